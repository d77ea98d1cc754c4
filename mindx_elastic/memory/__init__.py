"""Everything that outlives a killed process, in files of a memory file system (``/dev/shm``, or MINDX_ARENA_DIR).

::

    {base}/mindx-elastic-{uid}/      one folder a user, mode 700                         `folders`
        agent-{pid}-{random}/        one folder an agent                                 `agent_folder`
        {directory's digest}/        one folder a job: the arenas of this machine        `arena`

=========================  ==================================  =============================  ==========================
file                       written by                          read by                        removed by
=========================  ==================================  =============================  ==========================
agent-*/rank_R.page        the worker (`core.status_page`)     the agent, ``status``          the agent at each restart
agent-*/control.json       the agent: its orders               the workers                    the agent at each restart
agent-*/agent.json,        the agent                           the workers, other agents,     the agent at its end, else
job.key                                                        ``clean``                      the next agent, ``clean``
JOB/owner.json             each rank at its start (`memory`)   a start (`known_runs`), the    the last rank that goes
                                                               holder, ``clean``
JOB/rank_R/slot_0, slot_1  the rank, at some boundaries        a start (`memory_files`), the  the rank when its training
                           (`snapshots`)                       holder                         has ended well, the holder
JOB/rank_R/commit          the same: what is true of the two   the same                       once the disk has them, or
                           slots (`arena`)                                                    ``clean``
JOB/rank_R/boundaries      the rank, at each boundary of a     the same                       the same
                           replicated job (`boundaries`)
JOB/rank_R/lock, interval  the rank (`arena`)                  the next process of the rank   the same
=========================  ==================================  =============================  ==========================

Folders go through the functions at the end of `folders` only. Besides, a start empties a slot that a killed process has
left useless (`snapshots.adopt_slots`), and puts a damaged snapshot into the quarantine of the checkpoint directory.
"""
