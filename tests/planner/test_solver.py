"""The solver against every choice, and against random ones; what it says if nothing fits. Pure tables, no torch."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from lightning_solo.errors import BudgetError
from lightning_solo.planner import solver
from lightning_solo.planner.solver import (
    Call,
    Choice,
    Movable,
    Option,
    Problem,
    _by_highs,
    _equal_blocks,
    _Tables,
    closest,
    corrected,
    evaluate,
    solve,
)
from tests.messages import mentions

UP, DOWN = ("backward", "up"), ("backward", "down")


def unequal(count: int, seed: int, states: int = 0, equal: bool = False) -> Problem:
    """Return a problem of blocks with random bytes and seconds, as those of a U-Net differ."""
    draw = random.Random(seed)
    calls = []
    for number in range(count):
        if number == 0 or not equal:
            seconds, kept, given = draw.uniform(1, 4), draw.randint(20, 200), draw.randint(2, 8)
            working = kept + draw.randint(0, 20)
            options = {
                "keep": Option(kept, kept + 5, draw.randint(0, 30), seconds, 2 * seconds),
                "products": Option(kept * 6 // 10, kept, kept // 2, seconds, 2.1 * seconds),
                "recompute": Option(given, kept // 2, working, seconds, 3 * seconds),
                "host_input": Option(0, kept // 2, working + given, seconds, 3 * seconds, given),
                "offload": Option(kept // 10, kept // 3, kept, seconds, 2 * seconds, kept - kept // 10),
            }
        calls.append(Call(f"blocks.{number}", options))
    movables = {"states": Movable(states, states // 20, {UP: 1, DOWN: 1})} if states else {}
    order = [*reversed(range(count))]
    return Problem(calls, order, 1000, 60, 1020, {"forward": 2.0, "step": 1.0}, 0, None, movables, draw.choice([9, 40]))


def within(problem: Problem, share: float, host: int | None = None) -> Problem:
    """Return the problem with a budget between the least and the most that its blocks take."""
    small = [mode for mode in ("recompute", "host_input") if mode in problem.calls[0].options]
    least = min(evaluate(problem, dict.fromkeys(problem.options, mode)).peak for mode in small)
    most = evaluate(problem, dict.fromkeys(problem.options, "keep")).peak
    return replace(problem, budget=int(least + share * (most - least)), host=host)


def every(problem: Problem) -> list[Choice]:
    return [
        evaluate(problem, dict(zip(problem.options, modes, strict=True)))
        for modes in itertools.product(*problem.options.values())
    ]


def feasible(problem: Problem, choice: Choice) -> bool:
    return choice.peak <= problem.budget and (problem.host is None or choice.host <= problem.host)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("highs", [True, False], ids=["highs", "search"])
def test_choice_is_the_fastest_of_all(seed: int, highs: bool) -> None:
    problem = unequal(4, seed)
    choices = every(problem)
    for share, host in ((0.1, None), (0.5, 40), (0.8, None)):
        limited = within(problem, share, host)
        best = min(choice.seconds for choice in choices if feasible(limited, choice))
        found = solve(limited, highs=highs)
        assert feasible(limited, found)
        assert found == evaluate(limited, found.modes)
        assert best * (1 - 1e-9) <= found.seconds <= best * (1.005 if highs else 1.02)


@pytest.mark.long
@pytest.mark.parametrize("states", [0, 400])
@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("highs", [True, False], ids=["highs", "search"])
def test_no_random_plan_is_faster(share: float, states: int, highs: bool) -> None:
    for seed in range(3):
        problem = within(unequal(12, seed, states), share)
        draw, best, tried = random.Random(seed), float("inf"), 0
        while tried < 500:
            weights = [draw.random() ** 3 for _ in range(5)]  # some plans lean to one mode
            modes = {block: draw.choices(options, weights)[0] for block, options in problem.options.items()}
            away = {"states": draw.choice([0, 100, 200, 300, 400])} if states else {}
            choice = evaluate(problem, modes, away)
            if not feasible(problem, choice):
                continue
            tried, best = tried + 1, min(best, choice.seconds)
        begin = time.monotonic()
        assert solve(problem, highs=highs).seconds <= 1.02 * best, f"against {best} of {tried}"
        assert time.monotonic() - begin < 60  # a runaway search, not a figure


@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_equal_blocks_are_those_of_the_fastest_choice(seed: int) -> None:
    modes = ("keep", "products", "recompute") if seed % 2 else ("keep", "host_input", "offload")
    one, other = (unequal(3, each, equal=True) for each in (seed, seed + 9))
    calls = [
        Call(f"blocks.{number}", {mode: call.options[mode] for mode in modes})
        for number, call in enumerate([*one.calls, *other.calls])
    ]
    orders = [5, 4, 3, 2, 1, 0], [2, 1, 0, 5, 4, 3], [4, 3, 5, 2, 1, 0]
    for order, numbers in zip(orders, ([3, 3], [1] * 6, [3, 1, 1, 1]), strict=True):
        problem = replace(one, calls=calls, order=order, bandwidth=30)
        assert [len(group) for group in _equal_blocks(_Tables(problem))] == numbers
        choices = every(problem)
        least, most = min(choice.peak for choice in choices), max(choice.peak for choice in choices)
        for share in (0.02, 0.4):
            limited = replace(problem, budget=int(least + share * (most - least)))
            # HiGHS leaves its tolerance, which is less than a byte
            best = min(choice.seconds for choice in choices if choice.peak < limited.budget)
            found = _by_highs(tables := _Tables(limited))
            assert found is not None
            assert tables.fits(*found)
            assert tables.seconds(*found) <= best * 1.006


def test_a_block_of_several_calls_or_without_backward_equals_no_other() -> None:
    problem = unequal(5, 1, equal=True)
    calls = [*problem.calls, problem.calls[4]]
    tables = _Tables(replace(problem, calls=calls, order=[5, 4, 3, 2, 0]))  # the second has no backward
    assert _equal_blocks(tables) == [[0], [1], [2], [3], [4]]
    tables = _Tables(replace(problem, calls=calls, order=[5, 4, 3, 2, 1, 0]))
    assert _equal_blocks(tables) == [[0, 1, 2, 3], [4]]


def test_solver_that_stops_early_has_a_choice_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = within(unequal(40, 1), 0.3)
    proven = solve(problem, highs=True)
    monkeypatch.setattr(solver, "NODES", 0)
    monkeypatch.setattr(solver, "GAP", 0.0)
    early = solve(problem, highs=True)
    assert feasible(problem, early)
    assert early.seconds <= min(1.02 * proven.seconds, solve(problem, highs=False).seconds)


def test_equal_blocks_are_solved_by_their_number() -> None:
    problem = within(unequal(40, 1, equal=True), 0.5)
    by_highs, by_search = solve(problem, highs=True), solve(problem, highs=False)
    assert by_search.seconds <= 1.01 * by_highs.seconds
    assert by_highs.seconds <= 1.006 * by_search.seconds


def test_everything_is_kept_if_it_fits(capfd: pytest.CaptureFixture[str]) -> None:
    problem = within(unequal(6, 5, 300), 1.0)
    for highs in (True, False):
        choice = solve(problem, highs=highs)
        assert set(choice.modes.values()) == {"keep"}
        assert choice.away == {}
    assert capfd.readouterr() == ("", ""), "HiGHS prints nothing"


@pytest.mark.parametrize("highs", [True, False], ids=["highs", "search"])
def test_missing_bytes_are_named_if_nothing_fits(highs: bool) -> None:
    problem = unequal(4, 2)
    least = min(choice.peak for choice in every(problem))
    with pytest.raises(BudgetError, match=mentions("10 B on the device")) as caught:
        solve(replace(problem, budget=least - 10), highs=highs)
    assert (caught.value.needed, caught.value.available) == (least, least - 10)
    assert closest(replace(problem, budget=least - 10), highs=highs).peak == least


def test_missing_bytes_of_the_host_are_named() -> None:
    problem = within(unequal(4, 2, 300), 0.0, host=0)
    low = replace(problem, budget=problem.budget - 100)  # only states on the host would make room
    with pytest.raises(BudgetError, match=mentions("on the host")):
        solve(low)
    assert feasible(replace(low, host=400), solve(replace(low, host=400)))


def test_states_leave_before_blocks_are_recomputed_if_their_copies_are_hidden() -> None:
    every_mode = unequal(6, 3, 300)
    calls = [replace(call, options={m: call.options[m] for m in ("keep", "recompute")}) for call in every_mode.calls]
    problem = within(replace(every_mode, calls=calls, bandwidth=1e6), 0.5, host=10**6)
    problem = replace(problem, budget=problem.budget - 100)
    assert solve(problem).away["states"] > 0
    assert solve(problem, highs=False).away["states"] > 0
    problem = replace(problem, budget=problem.budget + 100)
    slow = replace(problem, bandwidth=1e-3)
    assert solve(slow).away == {}
    assert solve(slow, highs=False).away == {}


def test_calls_of_one_block_have_one_mode() -> None:
    one = unequal(4, 7)
    shared = replace(one, calls=[replace(call, block="shared") for call in one.calls])
    assert set(shared.options) == {"shared"}
    limited = replace(shared, budget=evaluate(shared, {"shared": "recompute"}).peak)
    assert solve(limited).modes["shared"] in ("recompute", "host_input", "offload")


def test_every_blocks_backward_is_within_the_budget() -> None:
    """The largest block is the first, so its recomputation meets what is left of all others' at the end of backward."""
    small, large = Option(10, 10, 5, 1, 2), Option(100, 100, 5, 1, 2)
    calls = [
        Call("large", {"keep": large, "recompute": Option(0, 60, 190, 1, 3)}),
        Call("small", {"keep": small, "recompute": Option(0, 10, 12, 1, 3)}),
    ]
    problem = Problem(calls, [1, 0], 0, 5, 0, {}, 150)
    assert evaluate(problem, {"large": "recompute", "small": "keep"}).peak == 190
    assert solve(problem).modes == {"large": "keep", "small": "keep"}
    assert solve(replace(problem, budget=114)).peak <= 114  # 100 + 10 + 5 at the end of forward exceed it


def test_forward_and_optimizer_step_are_within_the_budget() -> None:
    options = {"keep": Option(10, 100, 5, 1, 2), "recompute": Option(0, 20, 12, 1, 3)}
    of_forward = Problem([Call("one", options)], [0], 0, 0, 0, {}, 50)
    of_step = Problem([Call("one", options)], [0], 100, 0, 290, {}, 280, movables={"states": Movable(100)})
    for highs in (True, False):
        assert solve(of_forward, highs=highs).modes == {"one": "recompute"}
        assert solve(of_step, highs=highs).away["states"] >= 10  # 290 - 280
    for problem in (of_forward, of_step):  # `solve` would also drop a solution that exceeds the budget
        found = _by_highs(tables := _Tables(problem))
        assert found is not None
        assert tables.choice(*found).peak <= problem.budget


def test_exposed_copies_take_time_and_buffers_stay_on_the_device() -> None:
    call = Call("one", {"offload": Option(10, 10, 10, 1, 2, copied=8)})
    movables = {"states": Movable(50, buffers=7)}
    problem = Problem([call], [0], 100, 0, 0, {}, 200, None, movables, 1.0, {"offload": 0.5, "states": 0.1})
    assert evaluate(problem, {"one": "offload"}).seconds == 8 + 8 + 8 * 0.5  # of the bus each way, and of waits
    moved = evaluate(problem, {"one": "offload"}, {"states": 50})
    assert (moved.peak, moved.seconds) == (100 + 20 - 50 + 7, 8 + 8 + 8 * 0.5 + 50 * 0.1)


@pytest.mark.parametrize("highs", [True, False], ids=["highs", "search"])
def test_waits_for_copies_count_against_a_mode_and_a_movable(highs: bool) -> None:
    options = {
        "keep": Option(100, 0, 0, 1, 2),
        "recompute": Option(0, 0, 100, 1, 3),
        "offload": Option(0, 0, 0, 1, 2, 8),
    }
    states = {"states": Movable(200)}
    problem = Problem([Call("one", options)], [0], 200, 0, 0, {}, 280, None, states, 1e6)
    assert solve(problem, highs=highs).seconds == pytest.approx(3, rel=1e-3)
    slow = replace(problem, exposed={"offload": 1.0, "states": 1.0})
    assert solve(replace(slow, budget=300), highs=highs).modes == {"one": "keep"}
    if highs:
        assert solve(replace(slow, budget=210), highs=highs).modes == {"one": "offload"}  # 8 s, or 90 of states
    assert solve(replace(slow, budget=298), highs=highs).away == {"states": 2}


@pytest.mark.parametrize("seconds", [9.0, 7.0])
def test_correction_makes_a_choice_take_the_measured_seconds(seconds: float) -> None:
    problem = replace(
        unequal(4, 1, states=300), exposed={**dict.fromkeys(("offload", "host_input", "states"), 1.0), "recompute": 5.0}
    )
    modes = dict(zip(problem.options, ("offload", "host_input", "keep", "keep"), strict=True))
    before = evaluate(problem, modes, {"states": 100})
    after = corrected(problem, before, before.seconds * seconds / 8)
    assert evaluate(after, modes, {"states": 100}).seconds == pytest.approx(before.seconds * seconds / 8)
    assert after.exposed["recompute"] == 5.0, "no byte of it is copied"
    plain = evaluate(problem, dict.fromkeys(problem.options, "keep"))
    assert corrected(problem, plain, 2 * plain.seconds) is problem, "no copy explains the difference"


def test_blocks_that_copy_are_spread_among_the_others() -> None:
    options = {"recompute": Option(1, 1, 5, 1, 3), "offload": Option(0, 1, 5, 1, 2, copied=10)}
    calls = [Call(f"blocks.{number}", options) for number in range(9)]
    problem = Problem(calls, [*reversed(range(9))], 0, 0, 0, {}, 20, host=30)
    for highs in (True, False):
        modes = [*solve(problem, highs=highs).modes.values()]
        assert modes == ["recompute", "recompute", "offload"] * 3


@pytest.mark.parametrize("highs", [True, False], ids=["highs", "search"])
def test_states_make_room_for_spreading_blocks_that_copy(highs: bool) -> None:
    options = {"keep": Option(100, 105, 10, 1, 2), "offload": Option(10, 60, 40, 1, 2, copied=90)}
    calls = [Call(f"blocks.{number}", options) for number in range(6)]
    states = {"states": Movable(400, 0, {UP: 1, DOWN: 1})}
    problem = Problem(
        calls, [*reversed(range(6))], 1000, 0, 0, {}, 1000, movables=states, bandwidth=1e3, exposed={"offload": 1e-4}
    )
    choice = solve(problem, highs=highs)
    assert [*choice.modes.values()] == ["keep", "offload"] * 3
    assert choice.away == {"states": 380}, "one after the other they need 40 less"


def test_search_moves_states_to_make_room_for_faster_modes() -> None:
    options = {
        "recompute": Option(2, 22, 33, 1, 2),
        "keep": Option(58, 16, 27, 1, 1),
        "offload": Option(5, 37, 46, 1, 1, copied=45),
    }
    calls = [Call(f"blocks.{number}", options) for number in range(12)]
    states = {"states": Movable(305, 15, {UP: 1, DOWN: 1})}
    problem = Problem(calls, [*reversed(range(12))], 905, 0, 0, {}, 710, None, states, bandwidth=84)
    by_highs, by_search = solve(problem, highs=True), solve(problem, highs=False)
    assert by_highs.seconds <= by_search.seconds <= 1.05 * by_highs.seconds


@pytest.mark.parametrize("highs", [True, False], ids=["highs", "search"])
def test_whole_movable_leaves_as_a_whole(highs: bool) -> None:
    call = Call("block", {"keep": Option(10, 10, 10, 1.0, 2.0)})
    states = {"first": Movable(300, is_whole=True), "states": Movable(500)}
    problem = Problem([call], [0], 1000, 0, 0, {}, 0, None, states, exposed={"first": 1.0})
    assert solve(replace(problem, budget=900), highs=highs).away == {"states": 120}
    assert solve(replace(problem, budget=300), highs=highs).away == {"first": 300, "states": 420}


def test_solver_needs_no_torch() -> None:
    code = "import sys, lightning_solo.planner.solver; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_search_moves_the_exact_bytes_that_the_device_lacks_where_the_host_is_short() -> None:
    # 3000 + 300 kept + 100 buffers - 1550 = 1850; in quarters of 2000 bytes, 1500 are too few and 2000 too many
    calls = [Call("block", {"keep": Option(300, 300, 0, 1.0, 2.0)})]
    states = {"states": Movable(2000, 100, {UP: 1, DOWN: 1})}
    problem = Problem(calls, [0], 3000, 0, 1000, {}, budget=1850, host=1600, movables=states)
    assert solve(problem, highs=False).away == {"states": 1550}


def test_search_recomputes_where_the_host_has_room_for_states_only() -> None:
    # bytes kept, of forward and of backward, and seconds of forward
    rows = [
        (657, 718, 545, 0.05),
        (976, 1043, 492, 0.11),
        (82, 145, 6, 0.07),
        (844, 915, 783, 0.17),
        (336, 363, 33, 0.2),
    ]
    calls = []
    for number, (kept, forward, backward, seconds) in enumerate(rows):
        options = {
            "keep": Option(kept, forward, backward, seconds, 2 * seconds),
            "recompute": Option(kept // 8, forward, kept + backward // 2, seconds, 3 * seconds),
            "offload": Option(0, forward, kept + backward // 2, seconds, 2 * seconds, kept),
        }
        calls.append(Call(f"blocks.{number}", options))
    states = {"states": Movable(2000, 0, {UP: 1, DOWN: 1})}
    problem = Problem(calls, [4, 3, 2, 1, 0], 3000, 32, 2558, {}, 3584, 2149, states, bandwidth=28642)
    assert feasible(problem, solve(problem, highs=False))


def test_search_leaves_no_more_on_the_host_than_the_device_lacks() -> None:
    call = Call("block", {"keep": Option(10, 10, 10, 1.0, 2.0)})
    moved = {"states": Movable(800, 0, {UP: 1, DOWN: 1})}
    problem = Problem([call], [0], 1000, 0, 1000, {}, 0, None, moved, 40)
    lacking = replace(problem, budget=evaluate(problem, {"block": "keep"}).peak - 50)
    assert solve(lacking, highs=False).away == {"states": 50}
