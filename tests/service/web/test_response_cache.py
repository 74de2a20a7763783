import threading

import pytest

from hilbert_monitor.service.web.response_cache import ResponseCache


def test_an_answer_is_worked_out_once_for_all_who_ask_at_the_same_time():
    memo, calls, barrier = ResponseCache(), [], threading.Barrier(20)

    def make():
        calls.append(1)
        return b"answer"

    def ask():
        barrier.wait()
        answers.append(memo.get("key", make).content)

    answers = []
    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [b"answer"] * 20
    assert len(calls) == 1


def test_the_memo_forgets_what_was_not_asked_for_lately():
    memo, calls = ResponseCache(room=50_000), []
    for key in (1, 2, 1, 3, 1, 2):
        memo.get(key, lambda key=key: calls.append(key) or bytes(20_000))
    assert calls == [1, 2, 3, 2]


def test_a_failure_is_not_remembered():
    memo = ResponseCache()
    with pytest.raises(ZeroDivisionError):
        memo.get("key", lambda: 1 // 0)
    assert memo.get("key", lambda: b"good").content == b"good"
