"""Less text for the small runs of the benches: to tokenize all of the standard library takes longer than they do."""

import pytest

from hilbert_monitor.bench import small_run
from hilbert_monitor.pretrain.corpus import standard_library


@pytest.fixture(scope="session")
def less_text():
    """A sixth of the standard library."""
    files = standard_library()[::6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_run, "standard_library", lambda: files)
        small_run.small_corpus.cache_clear()
        yield
    small_run.small_corpus.cache_clear()
