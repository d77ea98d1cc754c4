"""``mindx-elastic doctor``: what of this machine and this environment would cost a job its steps.

Each module gives back its `saving.Finding`s. What a start refuses by itself (owners, values of variables, launchers)
is not looked at here. What is measured is apart from what is concluded (`saving`), so that conclusions are tested with
figures of machines that are not there.
"""
