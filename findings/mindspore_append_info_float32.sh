#!/usr/bin/env bash
# Finding: MindSpore keeps the Python floats of append_dict (append_info) in 32 bits; a time stamp comes back half a minute wrong.
# mindspore 2.10.0, CPU, formats ckpt and safetensors. Integers come back whole (2**40), a float such as time.time() is rounded to the next float32:
# 1764441234.123 is read as 1764441216.0, without a word; 0.1 as 0.10000000149. A text in append_dict is kept in a .ckpt, but such a file cannot be
# made a safetensors file: ckpt_to_safetensors raises an error of the safetensors library. Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet mindspore==2.10.0 numpy==1.26.4 scipy==1.13.1
cat > show.py <<'PYTHON'
import mindspore as ms
import numpy as np

weight = ms.Parameter(ms.Tensor(np.ones(2, np.float32)), name="w")
saved = {"time": 1764441234.123, "rate": 0.1, "count": 2**40}
print("mindspore", ms.__version__, "saved", saved)
for format in ("ckpt", "safetensors"):
    ms.save_checkpoint([{"name": "w", "data": weight}], f"a.{format}", append_dict=saved, format=format)
    read = ms.load_checkpoint(f"a.{format}", format=format)
    found = {key: read[key].asnumpy().item() for key in saved}
    print(format, found, read["time"].dtype)
    assert found["time"] == 1764441216.0 and found["rate"] != 0.1 and found["count"] == 2**40
ms.save_checkpoint([{"name": "w", "data": weight}], "b.ckpt", append_dict={"note": "x"})
print("a text in a .ckpt is read as", repr(ms.load_checkpoint("b.ckpt")["note"]))
try:
    ms.ckpt_to_safetensors("b.ckpt", "b")
except Exception as error:
    print("ckpt_to_safetensors:", type(error).__name__, str(error)[:28])
else:
    raise SystemExit("the text is converted")
PYTHON
venv/bin/python show.py 2> /dev/null
