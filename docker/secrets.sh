#!/usr/bin/env bash
# Makes docker/secrets: the keyfile of the replica set, and a random password for root and for each role. What is there stays.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p -m 700 secrets
# The files are readable for the users of the containers; the folder, on this machine, for nobody else.
make() { [ -e "secrets/$1" ] || { openssl rand "${@:2}" >"secrets/$1" && chmod 644 "secrets/$1"; }; }
make keyfile -base64 512
for user in root viewer approver submitter runner janitor; do
    make "${user}_password" -hex 24
done
