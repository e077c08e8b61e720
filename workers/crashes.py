"""What happens when one of busload's own threads meets an error that is nobody's: the worker stops."""

from __future__ import annotations

import os
from collections.abc import Callable

from celery.utils.log import get_logger
from celery.worker import state

logger = get_logger(__name__)


def guard(target: Callable[[], None]) -> Callable[[], None]:
    """Wrap the main function of a thread, so that its crash ends the worker instead of leaving it deaf.

    The worker then hands its calls back and exits with EX_SOFTWARE, for its supervisor to start it again.
    """

    def run() -> None:
        try:
            target()
        except BaseException:
            logger.critical("busload: thread %s crashed; the worker stops", target.__name__, exc_info=True)
            state.should_stop = os.EX_SOFTWARE
            raise

    return run
