"""Random faults on several nodes, their etcd, their agents and the ways between, under load; see `nodes_storm`.

`make test` has 60 s of them, `make soak` ten minutes: `REACH_STORM_SEED` repeats one of either. Whatever is told is
true, no session has two owners, no two nodes lead; when the faults end everything settles: every gauge of every node is
0, and every agent is reachable from every node.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.support.dialled import CAN_TELL
from tests.support.etcd_cluster import etcd_cluster
from tests.support.node_wires import wired_nodes
from tests.support.nodes_storm import NodesStorm
from tests.support.ordeal import TIMES, Ordeal
from tests.support.storm import TOLD

pytestmark = pytest.mark.skipif(not CAN_TELL, reason="which process dialled cannot be told here")


async def storm_of(seed: int, seconds: float, folder: Path) -> None:
    """One storm against a mesh of its own."""
    async with etcd_cluster() as etcd, wired_nodes(etcd, **TIMES) as nodes:
        ordeal = Ordeal(etcd, nodes, folder)
        with ordeal.agents():
            await ordeal.ready()
            storm = NodesStorm(ordeal, seed)
            try:
                async with ordeal.under_load() as load:
                    await storm.rage(seconds)
                    await etcd.settled()
                    await ordeal.let_in()
                    await load.more(100)
                    await load.conversations_go_on()
                told = {*TOLD, "REGISTRY_UNAVAILABLE"}
                await ordeal.check(request=told, named=told, stream=told, session=told)
                print(ordeal.book.codes())
                # A conversation that is refused asks again at once: how often tells nothing.
                even = Counter(each.code for each in ordeal.book.outcomes.values() if each.what != "session")
                assert even["OK"] > even.total() / 2, even
            except BaseException as error:
                error.add_note("\n".join([*storm.log, ordeal.agents_logs()]))
                raise


@pytest.mark.timeout(300)
async def test_in_random_faults_of_a_whole_mesh_whatever_is_told_is_true(tmp_path: Path) -> None:
    await storm_of(int(os.environ.get("REACH_STORM_SEED") or 11), 60, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_in_ten_minutes_of_random_faults_whatever_is_told_is_true(tmp_path: Path) -> None:
    seed = int(os.environ.get("REACH_STORM_SEED") or random.SystemRandom().randrange(1 << 31))
    await storm_of(seed, 600, tmp_path)
