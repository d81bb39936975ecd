"""Where a process is lost, all others say which one; where certificates break, the fuzz over processes sees it.

Short versions of `python -m tests.lose_rank` and `python -m tests.fuzz_distributed`.
"""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from avow.distributed.silence import _followed
from tests.fuzz_distributed import run
from tests.lose_rank import Loss, lose

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def losses() -> list[Loss]:
    """Two processes killed and one stopped, among three groups that attend at the same time."""
    jobs = [(signal.SIGKILL, 32.0, 5), (signal.SIGKILL, 32.0, 8), (signal.SIGSTOP, 20.0, 20)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: lose(*job), jobs))


@pytest.mark.parametrize("number", range(3))
def test_all_others_name_a_process_that_is_lost(losses: list[Loss], number: int) -> None:
    loss = losses[number]
    assert loss.named, loss
    rest = "must take part until all have their answer; look at its log, and start the processes again"
    # On a machine too busy to let it speak, a process may have been silent before it was killed.
    words = ("gone", "silent") if loss.signal == "SIGKILL" else ("silent",)
    assert set(loss.said) <= {f"LostRank: rank {loss.victim}={word} {rest}" for word in words}


@pytest.mark.parametrize(
    "said",
    [
        ("LostRank: rank 1=gone", "LostRank: rank 2=gone"),  # one survivor blames another
        ("LostRank: rank 1=gone", "nothing"),
        ("LostRank: rank 1=gone",),
        ("RuntimeError: Connection closed by peer", "LostRank: rank 1=gone"),
    ],
)
def test_a_wrong_name_and_a_silence_are_noticed(said: tuple[str, ...]) -> None:
    assert Loss("SIGKILL", 1, 3, 1, 1.0, ("LostRank: rank 1=gone",) * 2).named
    assert not Loss("SIGKILL", 1, 3, 1, 1.0, said).named


def wrote(words: dict[int, str]) -> Store:
    store = HashStore()
    for rank, word in words.items():
        store.set(str(rank), word)
    return store


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ({0: "1 gone"}, (1, "gone")),
        ({0: "1 gone", 1: "2 gone", 2: "3 silent"}, (3, "silent")),
        # Rank 1 had given this one up, and so it was silent itself.
        ({0: "1 gone", 1: "0 silent"}, (0, "silent")),
    ],
)
def test_who_waited_for_whom_leads_to_the_one_that_is_missing(words: dict[int, str], missing: tuple[int, str]) -> None:
    assert _followed(wrote(words), 0, 1, "gone", 0.05) == missing


def test_a_survivor_that_has_not_yet_told_is_given_time() -> None:
    store = wrote({0: "1 gone"})

    def late() -> None:
        time.sleep(0.1)
        store.set("1", "0 silent")

    teller = threading.Thread(target=late)
    teller.start()
    # Far more than a busy machine needs; without it rank 1 would be called gone.
    assert _followed(store, 0, 1, "gone", 60.0) == (0, "silent")
    teller.join()


@pytest.mark.parametrize("count", [2, 4])
def test_no_certificate_breaks_in_a_slice_of_the_fuzz(count: int) -> None:
    tally = run(600, count, seed=7, heads=8)
    assert tally.broken == 0, tally.story
    assert tally.rows >= 600


def test_the_fuzz_notices_bounds_that_boast() -> None:
    tally = run(600, 2, seed=7, heads=8, boast=1e-3)
    assert tally.broken > 0 and "seed" in tally.story
