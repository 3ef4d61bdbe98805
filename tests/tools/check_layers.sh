#!/bin/sh
# The order of rooms and folders is kept: see scripts/check_layers.py.
exec "${PYTHON:-python3}" scripts/check_layers.py .
