"""Random jobs of every kind, drawn from a seed."""

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from tests.support.docker_engine import IMAGE

from torture.child_script import script
from torture.history import boottime
from torture.pipelines import Chains, KnownSnapshots
from torture.token_usage import has_a_price, price

LANES = 12
KEYS = 12
FEW_KEYS = 4
BACKSTOP = 45.0
"""Seconds after which what hangs until somebody cancels it ends by itself, in case that nobody does."""
FAST_RETRY = {"base": 0.2, "cap": 1.0, "on": ["failed", "timed_out"]}
Body = dict[str, Any]


Profile = Literal["mixed", "failing", "lanes", "steady", "hanging", "budgets", "builds", "files"]
"""What jobs to draw: all kinds; such that fail and are tried again; quick ones in lanes of the moment; long ones; such
that end when they are stopped; such that use up their budget; such that share a few reuse keys, and often fail; such
that leave files."""
MOMENT, MEETING = 2.0, 4
"""Seconds after which the lanes of the moment are left for new ones, and how many these are."""


class JobGenerator:
    """Draws jobs. `port` is where containers send their journal's lines, `upload` the files that some are given."""

    def __init__(
        self,
        rng: random.Random,
        runners: Sequence[str],
        journal: str,
        port: int,
        profile: Profile = "mixed",
        shelf: KnownSnapshots | None = None,
        upload: str = "",
    ) -> None:
        self.profile = profile
        self._upload = upload
        self._rng = rng
        self._runners = runners
        self._chains = Chains(rng, shelf or KnownSnapshots(), journal, port)
        self._journal = journal
        self._port = port

    def job(self, known: Sequence[str]) -> Body:
        """One job; it may need some of those that are known."""
        rng = self._rng
        match self.profile:
            case "mixed":
                return self._mixed(known)
            case "failing":
                return self._failing()
            case "lanes":
                return {**self.small(), "lane": f"lane {int(boottime() / MOMENT)}/{rng.randrange(MEETING)}"}
            case "steady":
                return self._process(lines=rng.randint(20, 60))
            case "hanging":
                return {**self._process(lines=2, hang=True), "stop_grace": 0.5, "timeout": BACKSTOP}
            case "budgets":
                return self._budgeted()
            case "builds":
                return self.build(f"key {rng.randrange(FEW_KEYS)}", rebuild=rng.random() < 0.3)
            case "files":
                return self._given(self._process(lines=rng.randint(1, 4)), chance=0.5)

    def _mixed(self, known: Sequence[str]) -> Body:
        rng = self._rng
        chance = rng.random()
        body = self._runs(quick=chance < 0.2)
        body |= {"stop_grace": 0.5, "on_lost": rng.choice(["requeue", "requeue", "requeue", "fail", "pause"])}
        if rng.random() < 0.5 and not hangs(body):
            body |= {"max_attempts": rng.choice([2, 3, 4]), "retry": FAST_RETRY}
        if chance < 0.2:
            body["lane"] = f"lane {rng.randrange(LANES)}"
        elif chance < 0.28:
            body["reuse_key"] = f"key {rng.randrange(KEYS)}"
            body["rebuild"] = rng.random() < 0.5
        if known and rng.random() < 0.1:
            body["needs"] = rng.sample(known, min(len(known), rng.choice([1, 2])))
        if rng.random() < 0.08:
            body["available_at"] = (datetime.now(UTC) + timedelta(seconds=rng.uniform(0.2, 4))).isoformat()
        elif rng.random() < 0.04:
            body["hold"] = True
        if rng.random() < 0.03:
            body["queue_timeout"] = rng.uniform(0.5, 5)
        if rng.random() < 0.1:
            body["priority"] = rng.randint(-2, 2)
        if rng.random() < 0.15 and has_a_price(body):
            body = price(body, rng)
        return self._given(body, chance=0.1)

    def _given(self, body: Body, *, chance: float) -> Body:
        """A job that may have files of its caller, if it can have any: not a function, nor a pipeline."""
        able = self._upload and body["runner"] != "function" and "tasks" not in body
        return {**body, "uploads": [self._upload]} if able and self._rng.random() < chance else body

    def build(self, key: str, *, rebuild: bool = False) -> Body:
        """A quick build for a reuse key, which fails as often as not."""
        rng = self._rng
        body = self._process(lines=rng.randint(1, 3), code=rng.choice([0, 3]))
        return {**body, "reuse_key": key, "rebuild": rebuild}

    def _budgeted(self) -> Body:
        """A process or a function with a budget, which may fail and be tried again until that is used up."""
        rng = self._rng
        process = self._process(lines=rng.randint(0, 6), code=rng.choice([0, 0, 3]))
        function = {**self.small(), "inputs": {"lines": rng.randint(0, 6), "pace": 0.05, "fail": rng.random() < 0.3}}
        body = price(rng.choice([process, function]), rng)
        return {**body, "max_attempts": 4, "retry": FAST_RETRY}

    def small(self) -> Body:
        """A function that returns immediately."""
        return {"runner": "function", "spec": {"name": "talk"}, "inputs": {"lines": 1, "pace": 0.01, "fail": False}}

    def _failing(self) -> Body:
        process = self._process(lines=self._rng.randint(10, 25), code=3)
        return {**process, "max_attempts": 4, "retry": FAST_RETRY, "stop_grace": 0.5}

    def _process(self, *, lines: int, code: int = 0, hang: bool = False) -> Body:
        spec = script(lines=lines, pace=0.2, code=code, hang=hang)
        spec["env"]["JOURNAL"] = self._journal
        return {"runner": "process", "spec": spec}

    def _runs(self, *, quick: bool) -> Body:
        """What it runs. A lane does one thing at a time, so what is for a lane is quick."""
        runner = self._rng.choice([*self._runners, "function"])
        if runner == "function":
            return self._function()
        if runner == "pipeline":
            return self._chains.draw(docker="docker" in self._runners and self._rng.random() < 0.5)
        spec, limits = self._child(containers=runner == "docker", quick=quick)
        if runner == "process":
            spec["env"]["JOURNAL"] = self._journal
            return {"runner": "process", "spec": spec, **limits}
        spec["env"]["PORT"] = str(self._port)
        return {"runner": "docker", "spec": {**spec, "image": IMAGE, "network": "host"}, **limits}

    def _function(self) -> Body:
        rng = self._rng
        if rng.random() < 0.1:
            return {"runner": "function", "spec": {"name": "block"}, "inputs": {"seconds": rng.uniform(0.1, 2)}}
        inputs = {"lines": rng.randint(1, 10), "pace": rng.uniform(0.0, 0.3), "fail": rng.random() < 0.15}
        limits: Body = {"timeout": rng.uniform(0.5, 3)} if rng.random() < 0.1 else {}
        return {"runner": "function", "spec": {"name": "talk"}, "inputs": inputs, **limits}

    def _child(self, *, containers: bool, quick: bool) -> tuple[Body, Body]:
        """A child: mostly quick, now and then long, failing, hanging, stubborn, or with a family."""
        rng = self._rng
        kin = not containers and rng.random() < 0.1
        chance = rng.random()
        if quick and chance < 0.8:
            return script(lines=rng.randint(1, 4), pace=0.03, code=rng.choice([0, 0, 0, 3])), {}
        if chance < 0.5:
            return script(lines=rng.randint(1, 8), pace=rng.uniform(0.02, 0.25), kin=kin), {}
        if chance < 0.65:
            return script(lines=rng.randint(10, 25), pace=rng.uniform(0.2, 0.4), kin=kin), {}
        if chance < 0.73:
            return script(lines=rng.randint(0, 4), pace=0.05, code=3, kin=kin), {}
        if chance < 0.8:
            hang = rng.random() < 0.6
            limits: Body = {"stop_after": rng.uniform(4, 8)} | ({"timeout": BACKSTOP} if hang else {})
            return script(lines=rng.randint(5, 20), pace=0.2, hang=hang), limits
        return script(lines=2, pace=0.1, hang=True, stubborn=rng.random() < 0.5, kin=kin), self._limit()

    def _limit(self) -> Body:
        """What ends a child that hangs: a short or a long limit, or somebody who cancels it."""
        rng = self._rng
        kind = rng.choice(["timeout", "long", "idle_timeout", "cancel", "cancel"])
        if kind == "cancel":
            return {"timeout": BACKSTOP}
        return {"timeout": rng.uniform(8, 12)} if kind == "long" else {kind: rng.uniform(1, 3)}


def hangs(body: Mapping[str, Any]) -> bool:
    """Whether a job is to be cancelled by its submitter."""
    return body.get("timeout") == BACKSTOP
