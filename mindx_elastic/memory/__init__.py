"""Everything that outlives a killed process, in files of a memory file system (``/dev/shm``, or MINDX_ARENA_DIR).

::

    {base}/mindx-elastic-{uid}/         one folder a user, mode 700: `folders`
        agent-{pid}-{random}/           one folder an agent: `agent_folder`
        prove-{pid}-{random}/           one a `mindx-elastic prove`: a separate memory file system for its runs
        {directory's digest}/           one folder a job, with a folder a rank: `arena`

====================  =============================================  =================================================
file                  written by                                     read by
====================  =============================================  =================================================
agent-*/agent.json    the agent, at its start                        workers; the next agent, ``clean``: is it dead?
agent-*/job.key       the agent of a one-node job                    workers
agent-*/control.json  the agent: its orders                          workers
agent-*/rank_*.page   the worker, at each step: `core.status_page`   the agent, ``status``
job/owner.json        each rank, at its start: `memory`              a start (`memory_files`), the holder, ``clean``
rank_*/slot_*         the rank, at some boundaries: `snapshots`      a start (`memory_files`), the holder
rank_*/commit         the same: what is true of the slots            the same
rank_*/boundaries     the rank, at each boundary: `boundaries`       the same
rank_*/copy           `mirror`: the rank lives on another node       the holder, `leftovers`
rank_*/lock           locked while the rank's process lives          `folders`, before anything is removed
====================  =============================================  =================================================

The functions at the end of `folders` remove folders, and no others do. An agent's folder goes at its end, else with the
next agent of the user or ``clean``. A rank's goes when its training has ended well, when the holder finds that the disk
is as far, or with ``clean``. Single files go earlier: pages and orders at each restart (`agent_folder`), a slot that a
killed process has left useless at the next start (`snapshots.adopt_slots`), a damaged one to the quarantine.
"""
