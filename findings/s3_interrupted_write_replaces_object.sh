#!/usr/bin/env bash
# Finding: a write to S3 that an exception cuts short replaces the good object by its first part, with s3fs, pyarrow and cloudpathlib.
# s3fs 2026.9.0, pyarrow 26.0.1, cloudpathlib 0.26.0, smart_open 9.0.2, moto 5.2.5 (a real HTTP server with S3's interface), CPU. An object is uploaded only
# when its file is closed, so half a write should leave the older one alone. But the file is closed by the with block, whatever leaves it: SIGTERM, whose
# handler exits, comes in the middle of the second checkpoint, and the object of that name is then the first half of it, complete for S3. smart_open
# gives the upload up, and the older checkpoint stays. (s3fs has fs.transaction for it.) Exits with 0 if so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet s3fs==2026.9.0 pyarrow==26.0.1 'cloudpathlib[s3]==0.26.0' 'smart_open[s3]==9.0.2' 'moto[server]==5.2.5'
cat > show.py <<'PYTHON'
import importlib.metadata
import os
import signal
import sys

os.environ.update(AWS_ACCESS_KEY_ID="nobody", AWS_SECRET_ACCESS_KEY="nothing", AWS_DEFAULT_REGION="us-east-1")

import boto3
import cloudpathlib
import pyarrow.fs
import s3fs
import smart_open
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(port=0, verbose=False)
server.start()
address = "127.0.0.1:%d" % server.get_host_and_port()[1]
client = boto3.client("s3", endpoint_url=f"http://{address}")
client.create_bucket(Bucket="bucket")

arrow = pyarrow.fs.S3FileSystem(access_key="nobody", secret_key="nothing", region="us-east-1", scheme="http", endpoint_override=address)
cloud = cloudpathlib.S3Client(endpoint_url=f"http://{address}")
openers = {
    "s3fs": lambda: s3fs.S3FileSystem(endpoint_url=f"http://{address}").open("bucket/model", "wb"),
    "pyarrow": lambda: arrow.open_output_stream("bucket/model"),
    "cloudpathlib": lambda: cloud.CloudPath("s3://bucket/model").open("wb", force_overwrite_to_cloud=True),
    "smart_open": lambda: smart_open.open("s3://bucket/model", "wb", transport_params={"client": client}),
}


def in_the_bucket():
    return client.get_object(Bucket="bucket", Key="model")["Body"].read()


def save(opener, content, stopped):
    with opener() as file:
        file.write(content[: len(content) // 2])
        if stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        file.write(content[len(content) // 2 :])


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
older, newer = b"older" * 3_000_000, b"newer" * 3_000_000
found = {}
for name, opener in openers.items():
    save(opener, older, stopped=False)
    assert in_the_bucket() == older
    try:
        save(opener, newer, stopped=True)
    except SystemExit:
        left = in_the_bucket()
        found[name] = "the older one" if left == older else "half of the newer one" if left == newer[: len(newer) // 2] else f"{len(left)} bytes"
        print(name, importlib.metadata.version(name), "after the stop:", found[name])
half = "half of the newer one"
assert found == {"s3fs": half, "pyarrow": half, "cloudpathlib": half, "smart_open": "the older one"}, found
sys.stdout.flush()
os._exit(0)  # the server waits for connections that the clients keep open
PYTHON
venv/bin/python show.py 2> /dev/null
