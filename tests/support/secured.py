"""A real MongoDB that asks who is there: a replica set of one node with authorization, and TLS for who wants it.

The throwaway server of `mongo_durable.dev` lets everybody in. This one has a keyfile, a root user (made through the localhost exception), and a
certificate that a certificate authority of its own has signed.
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pymongo
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pymongo.errors import PyMongoError

from mongo_durable.dev import find_mongod
from mongo_durable.dev.replica_set import _free_port, _Supervisor

_START_S = 60.0
ROOT = "root"


class SecuredMongo:
    """The server, while its `with` block lasts.

    Attributes:
        port: Where it listens on the loopback interface.
        authority: File with the certificate of the authority that has signed the server's.
        password: Of the root user.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.password = secrets.token_urlsafe(12)
        self.authority = folder / "authority.pem"
        self.port = 0

    def __enter__(self) -> SecuredMongo:
        key_file = self._folder / "keyfile"
        key_file.write_text(secrets.token_hex(64))
        key_file.chmod(0o400)
        server = self._folder / "server.pem"
        write_certificates(self.authority, server)
        data = self._folder / "data"
        data.mkdir()
        self.port = _free_port()
        command = [
            str(find_mongod()),
            *("--replSet", "rs0", "--bind_ip", "127.0.0.1", "--port", str(self.port), "--dbpath", str(data)),
            *("--keyFile", str(key_file), "--nounixsocket", "--quiet", "--wiredTigerCacheSizeGB", "0.25"),
            *("--tlsMode", "preferTLS", "--tlsCertificateKeyFile", str(server), "--tlsCAFile", str(self.authority)),
            "--tlsAllowConnectionsWithoutCertificates",
            *("--setParameter", "diagnosticDataCollectionEnabled=false", "--setParameter", "shutdownTimeoutMillisForSignaledShutdown=100"),
        ]
        self._supervisor = _Supervisor(self._folder, temporary=False)
        try:
            self._supervisor.start(0, command, self._folder / "mongod.log")
            with pymongo.MongoClient[Any]("127.0.0.1", self.port, directConnection=True, serverSelectionTimeoutMS=500) as nobody:
                self._wait(lambda: bool(nobody.admin.command("ping")))
                nobody.admin.command("replSetInitiate", {"_id": "rs0", "members": [{"_id": 0, "host": f"127.0.0.1:{self.port}"}]})
                self._wait(lambda: nobody.admin.command("hello")["isWritablePrimary"])
                nobody.admin.command("createUser", ROOT, pwd=self.password, roles=["root"])
        except BaseException:
            self._supervisor.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._supervisor.close()

    @property
    def root_uri(self) -> str:
        """URI of the user who may do everything."""
        return f"mongodb://{ROOT}:{self.password}@127.0.0.1:{self.port}/?replicaSet=rs0&authSource=admin"

    def user(self, database: str, *roles: str) -> str:
        """Make a user in `database` with these of its roles. Returns the user's URI."""
        name, password = f"{'-'.join(roles)}-{secrets.token_hex(4)}", secrets.token_urlsafe(12)
        with pymongo.MongoClient[Any](self.root_uri) as root:
            root[database].command("createUser", name, pwd=password, roles=list(roles))
        return f"mongodb://{name}:{password}@127.0.0.1:{self.port}/?replicaSet=rs0&authSource={database}"

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                if holds():
                    return
            except PyMongoError:
                pass  # not yet: asked again until the deadline
            log = self._folder / "mongod.log"
            assert self._supervisor.exit_code(0) is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.02)


def write_certificates(authority: Path, server: Path) -> None:
    """Make a certificate authority, and a server's key and certificate for the loopback interface that it has signed."""
    now = datetime.now(UTC)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        begun = x509.CertificateBuilder().subject_name(subject).issuer_name(named("test authority")).public_key(key.public_key())
        return begun.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=2))

    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    own = certificate(named("test authority"), authority_key).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    authority.write_bytes(own.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = certificate(named("localhost"), server_key).add_extension(names, critical=False).sign(authority_key, hashes.SHA256())
    private = server_key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    server.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
