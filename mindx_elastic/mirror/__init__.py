"""Copies of checkpoint files on other nodes, and of snapshots in their memory (`nearby`).

`mirror` sends and fetches them, `server` keeps them, `partners` decides which ranks keep whose, `wire` is the protocol.
"""
