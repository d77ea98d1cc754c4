"""A worker's side of a recovery in place where the job has several nodes: see `copies` and `agent.nodes_recovery`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindx_elastic.config import AgentInfo, RankInfo, RejoinSettings
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.copies import Parcel, Receive, send, sources, take
from mindx_elastic.rejoin.failures import RejoinFailed
from mindx_elastic.rejoin.host import Host
from mindx_elastic.rejoin.member import Found, Member
from mindx_elastic.rejoin.protocol import Report, Verdict
from mindx_elastic.rejoin.small_records import Courier, keepers

__all__ = ["NodesMember"]


class NodesMember(Member):
    """One per process."""

    def __init__(self, settings: RejoinSettings, ranks: RankInfo, agent: AgentInfo) -> None:
        super().__init__(settings, ranks, agent)
        self._node, self._num_nodes = settings.node, settings.num_nodes
        self._keepers = _parse_keepers(settings.keepers)
        """Where nodes' agents keep small records."""
        self._couriers: dict[tuple[str, int], Courier] = {}
        self._sources: dict[int, int] = {}
        """By node: the rank that copies the boundary there."""

    def courier(self, *, replicated: bool) -> Callable[..., None] | None:
        if not replicated:
            return None
        mine = keepers(self._num_nodes, self._node)
        wanted = [self._keepers[node] for node in mine if node in self._keepers]
        before, self._couriers = self._couriers, {}
        for address, courier in before.items():
            if address in wanted and courier.is_open:
                self._couriers[address] = courier
            else:
                courier.close()
        for address in wanted:
            if address not in self._couriers:
                self._couriers[address] = Courier(address, self._attempt, board_key(), self.ranks.rank)
        return self._send_to_keepers if self._couriers else None

    def _send_to_keepers(self, *record: Any, **kind: Any) -> None:
        for courier in self._couriers.values():
            courier.send(*record, **kind)

    def hears_from_afar(self) -> bool:
        """Training thread, after an error: whether another rank is gone, perhaps on another node. Its connections end
        before this node's agent has heard of it."""
        return self._failures is not None and self._failures.seen and self.comes_out_soon()

    def _hears_soon(self) -> bool:
        return self._host is not None and self.comes_out_soon()

    def _note_of(self, report: Report) -> dict[str, Any]:
        return {**report.to_json(), "node": self._node}

    def _take_in(
        self, verdict: Verdict, reports: Mapping[int, Report | None], notes: Mapping[int, Mapping[str, Any]]
    ) -> None:
        try:
            nodes = {rank: int(notes[rank]["node"]) for rank, report in reports.items() if report is not None}
        except (ValueError, KeyError, TypeError) as error:
            raise RejoinFailed(f"a rank does not say on which node it is ({error})") from None
        if not all(0 <= node < self._num_nodes for node in nodes.values()):
            raise RejoinFailed(f"ranks on nodes {sorted(set(nodes.values()))} of {self._num_nodes}")
        self._sources = sources(verdict, nodes)

    def _donates(self, verdict: Verdict) -> bool:
        return self.ranks.rank in self._sources.values()

    def _donate(self, board: Board, host: Host, generation: int, verdict: Verdict) -> None:
        path = host.donate()
        self._times["donated"] = time.time()
        is_donor = self.ranks.rank == verdict.donor
        parcel = Parcel.of(path, verdict) if is_donor and self._nodes_without else None
        self._give_copy(board, generation, path, parcel)

    @property
    def _nodes_without(self) -> list[int]:
        """The nodes that get the donor's file from another one."""
        return [node for node in range(self._num_nodes) if node not in self._sources]

    def _give_copy(self, board: Board, generation: int, path: Path, parcel: Parcel | None) -> None:
        """This node has the boundary in its shared memory. `parcel`: for those that get it from here."""
        note: dict[str, Any] = {"path": str(path)}
        if parcel is not None:
            note["parcel"] = parcel.to_json()
        board.write(f"{generation}/copy/{self._node}", note)

    def _get_state(self, board: Board, host: Host | None, generation: int, verdict: Verdict, receive: Receive) -> Found:
        self._move_copies(board, host, generation, verdict, receive)
        self._wait_for_state(board, host, generation)
        key = f"{generation}/copy/{self._node}"
        path, source = Path(str(self._wait(board, [key], host)[key]["path"])), self._sources.get(self._node)
        return Found(path, verdict.donor if source is None else source)

    def _find_state(self, board: Board, generation: int, verdict: Verdict, receive: Receive) -> Callable[[], Found]:
        where = super()._find_state(board, generation, verdict, receive)
        where()  # at once: the donor waits until this node has its file, and opening the guard waits for the donor
        return where

    def _move_copies(
        self, board: Board, host: Host | None, generation: int, verdict: Verdict, receive: Receive
    ) -> None:
        """See that each node has the boundary; the donor then says so."""
        me, donor, over = self.ranks.rank, verdict.donor, f"{generation}/state"
        given = next(f"{generation}/copy/{node}" for node, source in self._sources.items() if source == donor)
        takers = {node: f"{generation}/take/{node}" for node in self._nodes_without}
        if me == donor:
            note = self._wait(board, [given], host)[given]
            path, length = Path(str(note["path"])), int(note.get("parcel", {}).get("ring_bytes", 0))
            for said in (self._wait(board, list(takers.values()), host, unless=over) if takers else {}).values():
                send(path, length, int(said["rank"]), self._timeout_s)
            self._wait(board, [f"{generation}/copy/{node}" for node in range(self._num_nodes)], host, unless=over)
            word = board.write(over, {"path": str(path)})
            if "path" not in word:
                raise RejoinFailed(str(word.get("refusal")))
        elif self._node in takers and board.write(takers[self._node], {"rank": me}).get("rank") == me:
            parcel = Parcel.from_json(self._wait(board, [given], host, unless=over)[given].get("parcel"))
            if (parcel.attempt, parcel.step) != (verdict.attempt, verdict.step):
                raise RejoinFailed("the donor gives another boundary")
            self._give_copy(board, generation, take(parcel, donor, receive, self._timeout_s), None)


def _parse_keepers(text: str) -> dict[int, tuple[str, int]]:
    """``MINDX_REJOIN_NODES``: ``NODE=HOST:PORT`` of those that keep small records."""
    found: dict[int, tuple[str, int]] = {}
    for each in text.split():
        node, _, address = each.partition("=")
        host, _, port = address.rpartition(":")
        found[int(node)] = (host, int(port))
    return found
