#!/usr/bin/env bash
# Finding: webdataset's shuffle has another order in each process, whatever seeds the program sets.
# webdataset 1.0.2, numpy, CPU. random.seed(0), numpy.random.seed(0) and torch.manual_seed(0) are called first; the same small program is run twice.
# wds.shuffle(10) makes its own generator from the time and the process id, so the orders differ; with shuffle(10, seed=0) they are
# the same. A run that is resumed by skipping to its place meets other samples. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy braceexpand pyyaml
venv/bin/pip install --quiet --no-deps webdataset==1.0.2
cat > show.py <<'PYTHON'
import random, sys
import numpy, torch
import webdataset

random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
seed = {"seed": 0} if sys.argv[1:] else {}
samples = [{"number": number} for number in range(20)]
pipeline = webdataset.DataPipeline(lambda: iter(samples), webdataset.shuffle(10, **seed))
print([sample["number"] for sample in pipeline])
PYTHON
venv/bin/pip list 2> /dev/null | grep -iE "^(webdataset|torch) "
one=$(venv/bin/python show.py)
two=$(venv/bin/python show.py)
echo "first process:  $one"
echo "second process: $two"
[ "$one" != "$two" ] && [ "$(venv/bin/python show.py seed)" = "$(venv/bin/python show.py seed)" ]
