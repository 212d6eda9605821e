#!/usr/bin/env bash
# Makes an authority and a certificate for 127.0.0.1, valid for two days: certificates.sh FOLDER. Needs openssl.
set -euo pipefail
mkdir -p "$1"
cd "$1"
key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=node)
{
    openssl req -x509 "${key[@]}" -days 2 -keyout key.pem -out ca.pem
    openssl req -new "${key[@]}" -keyout node.key -out node.csr
    echo subjectAltName=IP:127.0.0.1 > names
    openssl x509 -req -in node.csr -CA ca.pem -CAkey key.pem -CAcreateserial -days 2 -extfile names -out node.pem
} 2> errors || { cat errors >&2 && exit 1; }
