#!/bin/sh
# Runs mongo-durable as the user MONGO_DURABLE_USER, whose password is a secret: MONGO_DURABLE_URI is put together here, where it is not given.
set -eu
if [ -z "${MONGO_DURABLE_URI:-}" ]; then
    password="$(cat "/run/secrets/${MONGO_DURABLE_USER}_password")"
    MONGO_DURABLE_URI="mongodb://${MONGO_DURABLE_USER}:${password}@${MONGO_DURABLE_HOSTS}/?replicaSet=rs0&authSource=${MONGO_DURABLE_AUTH_SOURCE:-${MONGO_DURABLE_DATABASE:-mongo_durable}}"
    export MONGO_DURABLE_URI
fi
exec mongo-durable "$@"
