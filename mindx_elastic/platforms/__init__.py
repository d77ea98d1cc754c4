"""Formats and conventions of the platforms around a job. The engine knows none of them; joiners ask these files.

=======================  ================================================  =========================================
file                     what it reads or writes                           source of the format
=======================  ================================================  =========================================
``faults.py``            fault reports, once, for a plan                   MindCluster: Volcano, NodeD, ClusterD
``fault_watch.py``       the same while the job runs                       MindCluster
``launchers.py``         the rank of this process; launchers not read      MindSpore, Slurm, MPI, Horovod
``flag_file.py``         ``{"GracefulExit": 1}``                           MindSpore, ``OnRequestExit``
``tft_tree.py``          the tree of TTP checkpoints                       MindSpore and MindIO, ``TFTRegister``
``strategy_file.py``     strategy files, and functions over them           MindSpore, ``node_strategy.proto``
``mindspore_layout.py``  a layout in the terms of such a file (pure)       MindSpore, auto-parallel
``group_info.py``        ``GROUP_INFO_FILE``, and a replica's checkpoint   MindSpore, ``ParallelGroupMap``
``plan_files.py``        a plan for others, ``RESTORE_RANKS``              ours; ModelArts' start scripts
``small_files.py``       bounded reading, JSON objects, atomic writing     POSIX
=======================  ================================================  =========================================

A further platform (Slurm, Kubernetes without MindCluster, notices of a spot instance's end) is a file here that tells
what it hears in the engine's words: `faults.Faults` for ranks a plan may not rely on, `fault_watch.FaultEvent` for a
wish that the job stop.
"""
