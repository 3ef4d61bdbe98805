#!/bin/sh
# The layers hold: see scripts/check_layers.py.
exec "${PYTHON:-python3}" scripts/check_layers.py .
