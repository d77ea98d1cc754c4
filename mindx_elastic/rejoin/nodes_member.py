"""A worker's side of a recovery in place where the job has several nodes: see `copies` and `agent.nodes_recovery`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindx_elastic.config import AgentInfo, MemorySettings, RankInfo, RejoinSettings
from mindx_elastic.core.events import logger
from mindx_elastic.core.printable import printable
from mindx_elastic.core.status_page import NODES_REPLACED, RANKS_REPLACED
from mindx_elastic.memory.arena import RankArena
from mindx_elastic.memory.folders import job_folder
from mindx_elastic.rejoin.board import Board, board_key
from mindx_elastic.rejoin.copies import Parcel, Receive, send, sources, take
from mindx_elastic.rejoin.failures import RejoinFailed
from mindx_elastic.rejoin.host import Host
from mindx_elastic.rejoin.lost_node import FIRST, keepers
from mindx_elastic.rejoin.member import Found, Member
from mindx_elastic.rejoin.protocol import Report, Verdict
from mindx_elastic.rejoin.small_records import Courier, newest, put_into_ring

__all__ = ["NodesMember"]

_OTHER_NODE_S = 5.0  # the agents' word that no other node has come is to be faster
_AFAR_S = 3.0  # a death has to go through the store to another node's agent


class NodesMember(Member):
    """One per process."""

    def __init__(self, settings: RejoinSettings, ranks: RankInfo, agent: AgentInfo) -> None:
        super().__init__(settings, ranks, agent)
        self._node, self._num_nodes = settings.node, settings.num_nodes
        self._whole_nodes = bool(settings.whole_nodes)
        self._keepers = _parse_keepers(settings.whole_nodes)
        """Where nodes' agents keep small records."""
        self._couriers: dict[tuple[str, int], Courier] = {}
        self._sources: dict[int, int] = {}
        """By node: the rank that copies the boundary there."""

    _verdict_s = _OTHER_NODE_S

    def part_of_node(self, *, replicated: bool) -> int:
        # With the first node's agent the store ends, through which its ranks could stop others: they save, and end.
        self.ends_with_agent = self._whole_nodes and replicated and self._node != FIRST
        return NODES_REPLACED if self._whole_nodes and replicated else RANKS_REPLACED

    def courier(self, *, replicated: bool) -> Callable[..., None] | None:
        if not self._whole_nodes or not replicated:
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

    def _comes_in(self, board: Board, generation: int) -> None:
        # Its node may have been lost, with it, and another one have taken the place: one of the two must not go on.
        own = secrets.token_hex(8)
        if board.write(f"{generation}/joins/{self.ranks.rank}", {"process": own}).get("process") != own:
            raise RejoinFailed(f"another process has taken the place of rank {self.ranks.rank}")

    def hears_from_afar(self) -> bool:
        """Training thread, after an error: whether another rank is gone, perhaps on another node. Its connections end
        before this node's agent has heard of it."""
        return self._failures is not None and self._failures.seen and self._wants_out.wait(_AFAR_S)

    def _hears_soon(self) -> bool:
        return self._host is not None and (self._wants_out.wait(_AFAR_S) or super()._hears_soon())

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
        self._hear_of_keepers(board, generation)
        key = f"{generation}/copy/{self._node}"
        path, source = Path(str(self._wait(board, [key], host)[key]["path"])), self._sources.get(self._node)
        if host is None:
            self._take_records(board, generation, path, verdict)
        return Found(path, verdict.donor if source is None else source)

    def _find_state(self, board: Board, generation: int, verdict: Verdict, receive: Receive) -> Callable[[], Found]:
        where = super()._find_state(board, generation, verdict, receive)
        where()  # at once: the donor waits until this node has its file, and opening the guard waits for the donor
        return where

    def _hear_of_keepers(self, board: Board, generation: int) -> None:
        """Where the small records go. What is not said is as it was."""
        try:
            keys = {f"{generation}/keeper/{node}": node for node in keepers(self._num_nodes)}
            found = {keys[key]: (str(n["address"]), int(n["port"])) for key, n in board.read(list(keys)).items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("what the nodes say of themselves makes no sense: %s", printable(str(error), 200))
            return
        self._keepers |= found

    def _take_records(self, board: Board, generation: int, path: Path, verdict: Verdict) -> None:
        """A new process: what other nodes have kept of the rank whose node was lost, into its own ring."""
        base = MemorySettings.from_env().base
        keys = [f"{generation}/records/{self.ranks.rank}/{node}" for node in range(self._num_nodes)]
        try:
            notes = board.read(keys).values()
            if not notes or base is None:
                return
            note = max(notes, key=newest)
            given = next(f"{generation}/copy/{node}" for node, rank in self._sources.items() if rank == verdict.donor)
            directory = Path(str(board.read([given])[given]["parcel"]["directory"]))
            if job_folder(base, directory) != path.parent.parent:
                raise ValueError(f"{path} is not in the folder of {directory}")
            arena = RankArena(base, directory, self.ranks.rank)
            try:
                put_into_ring(note, verdict.run_id, arena.folder)
            finally:
                arena.close()
        except (OSError, ValueError, KeyError, TypeError) as error:  # it goes on without, and says what that means
            logger.warning("rank %d's small records cannot be used: %s", self.ranks.rank, printable(str(error), 200))

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
