#!/bin/sh
# torch-venv.sh FOLDER: makes a virtual environment with torch and its neighbours, for the tests of the Python package.
#
# pip takes them from the index that it is configured for. They need about 8 GB of disk while they are installed. Ends with
# an error, and says why, where that is not there, or where pip finds no torch.
set -eu
folder=${1:?usage: torch-venv.sh FOLDER}
python=${PYTHON:-python3}
free=$(df -Pk "$(dirname "$folder")" | awk 'NR == 2 {print int($4 / 1048576)}')
[ "$free" -ge 12 ] || { echo "torch-venv: $free GB are free, 12 are needed" >&2; exit 1; }
"$python" -m venv "$folder"
"$folder/bin/pip" install -q --disable-pip-version-check --no-input \
    torch transformers accelerate lightning safetensors numpy pytest cffi setuptools wheel zstandard lz4 xxhash tqdm
# Tests skip themselves where an import fails, so a broken installation must not look like a good one.
"$folder/bin/python" -W ignore -c 'import torch, transformers, accelerate, lightning, safetensors, cffi, pytest
assert torch.distributed.is_gloo_available()'
