"""``mindx-elastic doctor``: what of this machine, this directory and this environment would cost a job its steps.

`examine` asks one module after the other and gives back their `finding.Finding`s. What a module measures or reads is
apart from what it concludes, so that conclusions are tested with figures of machines that are not there.
"""
