"""How far ahead batches are held: further only where that would have saved a wait."""

from __future__ import annotations

from dsa.io.reach import MOST, Reach


class Steps:
    """Steps of a second each."""

    def __init__(self, fixed: int | None = None) -> None:
        self.reach = Reach(fixed)
        self.now_s, self.waited_s, self.idle_s = 100.0, 7.0, 50.0
        self.step(announced=False)  # the first one is measured against nothing

    def step(
        self,
        count: int = 1,
        *,
        waited_s: float = 0,
        idle_s: float = 0,
        used_up: bool = True,
        cheap: bool = False,
        announced: bool = True,
    ) -> int:
        for _ in range(count):
            self.now_s += 1
            self.waited_s += waited_s
            self.idle_s += idle_s
            self.reach.used_up, self.reach.cheap = used_up, cheap
            self.reach.stepped(self.now_s, waited_s=self.waited_s, idle_s=self.idle_s, announced=announced)
        return self.reach.batches


def test_it_grows_where_a_step_waits_for_what_there_had_been_time_for() -> None:
    steps = Steps()
    assert steps.step(waited_s=0.2, idle_s=0.2) == 4
    assert steps.step(waited_s=0.2, idle_s=0.2) == 8
    assert steps.step(9, waited_s=0.2, idle_s=0.2) == MOST


def test_it_does_not_grow_where_the_disk_had_no_time_to_spare_or_more_reach_would_not_help() -> None:
    steps = Steps()
    assert steps.step(20, waited_s=0.5, idle_s=0.0) == 2
    assert Steps().step(20, waited_s=0.0, idle_s=0.5) == 2
    assert Steps().step(20, waited_s=0.5, idle_s=0.5, used_up=False) == 2
    assert Steps().step(20, waited_s=0.5, idle_s=0.5, announced=False) == 2
    assert Steps().step(20, waited_s=0.02, idle_s=0.02) == 2


def test_it_grows_where_the_disk_is_busy_as_long_as_that_takes_few_frames() -> None:
    steps = Steps()
    assert steps.step(2, waited_s=0.2, cheap=True) == 8
    assert steps.step(2, cheap=True) == 8
    assert Steps().step(20, waited_s=0.5, used_up=False, cheap=True) == 2


def test_it_shrinks_to_one_where_it_is_longer_than_it_need_be() -> None:
    steps = Steps()
    assert steps.step(2, waited_s=0.2, idle_s=0.2) == 8
    assert steps.step(31) == 8
    assert steps.step() == 7
    assert steps.step(64, waited_s=0.5) == 5
    assert steps.step(400) == 1


def test_time_before_steps_that_were_not_announced_does_not_count() -> None:
    steps = Steps()
    steps.step(waited_s=5, idle_s=5, announced=False)
    assert steps.step(waited_s=0.0, idle_s=0.0) == 2


def test_a_fixed_one_stays() -> None:
    assert Steps(3).step(5, waited_s=0.5, idle_s=0.5) == 3
    assert Steps(0).step(100) == 0
    assert not Steps(3).reach.sizes_itself
