"""Where a process is lost, all others say which one; where certificates break, the fuzz over processes sees it.

Short versions of `python -m tests.helpers.lose_rank` and `python -m tests.fuzz_distributed`.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from avow import file_io
from avow.distributed import attend
from avow.distributed.point_to_point import _followed
from tests.fuzz_distributed import run
from tests.helpers.lose_rank import Loss, lose
from tests.helpers.processes import FRESH, meet, message, together

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
        # Rank 1 had waited for this one until the timeout.
        ({0: "1 gone", 1: "0 silent"}, (1, "late")),
        ({0: "2 gone", 2: "1 silent", 1: "0 silent"}, (1, "late")),
        # Another came too late.
        ({0: "1 silent", 1: "2 silent", 2: "1 gone"}, (2, "silent")),
        # Two that waited for each other name each other.
        ({0: "1 silent", 1: "0 silent"}, (1, "silent")),
    ],
)
def test_who_waited_for_whom_leads_to_the_one_that_is_missing(words: dict[int, str], missing: tuple[int, str]) -> None:
    peer, how = words[0].split()
    assert _followed(wrote(words), 0, int(peer), how, 0.05) == missing


def slow(after: float) -> str:
    """What a process is told where the second comes so many seconds late."""
    if dist.get_rank() == 1:
        time.sleep(after)
    return message(lambda: attend(*torch.randn(3, 1, 2, 8, 4).unbind()))


def test_a_slow_process_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    # Two thirds of the timeout: what is left is for a machine that is busy.
    assert together(2, functools.partial(slow, 16.0), tmp_path, 24.0) == ["no error"] * 2


def late(rank: int, folder: str) -> None:
    """Two processes attend when the first has given up waiting for the second."""
    meet(rank, 3, folder, 3.0)
    given = torch.randn(3, 1, 2, 8, 4).unbind()
    assert message(lambda: attend(*given)) == "no error"
    names = {f"told-{other}" for other in (0, 2)}
    while rank == 1 and not names <= {path.name for path in Path(folder).iterdir()}:
        time.sleep(0.05)
    told = message(lambda: attend(*given))
    file_io.write(Path(folder, f"told-{rank}"), told)
    dist.destroy_process_group()


def test_one_that_comes_after_the_timeout_is_named_by_the_others_and_names_them(tmp_path: Path) -> None:
    crowd = [FRESH.Process(target=late, args=(rank, str(tmp_path))) for rank in range(3)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    first, second, third = ((tmp_path / f"told-{rank}").read_text() for rank in range(3))
    rest = "must take part until all have their answer; look at its log, and start the processes again"
    assert first == third == f"LostRank: rank 1=silent {rest}"
    rule = "=gone waited for this process, rank 1, longer than the group's timeout of 3 s; raise the timeout if "
    assert second.startswith(("LostRank: rank 0" + rule, "LostRank: rank 2" + rule))


def test_a_survivor_that_has_not_yet_told_is_given_time() -> None:
    store = wrote({0: "1 gone"})

    def late() -> None:
        time.sleep(0.1)
        store.set("1", "2 silent")

    teller = threading.Thread(target=late)
    teller.start()
    # More than a busy machine needs; without it rank 1 would be called gone.
    assert _followed(store, 0, 1, "gone", 5.0) == (2, "silent")
    teller.join()


@pytest.mark.parametrize("count", [2, 4])
def test_no_certificate_breaks_in_a_slice_of_the_fuzz(count: int) -> None:
    tally = run(600, count, seed=7, heads=8)
    assert tally.broken == 0, tally.story
    assert tally.rows >= 600


def test_the_fuzz_notices_bounds_that_boast() -> None:
    tally = run(600, 2, seed=7, heads=8, boast=1e-3)
    assert tally.broken > 0 and "seed" in tally.story
