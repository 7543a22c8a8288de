#!/usr/bin/env bash
# Starts mongod with the keyfile as it wants it: its own, and readable for nobody else.
set -euo pipefail
install -m 400 -o mongodb -g mongodb /run/secrets/keyfile /tmp/keyfile
exec docker-entrypoint.sh mongod --replSet rs0 --bind_ip_all --keyFile /tmp/keyfile "$@"
