"""How a node gets at its registry: from settings to a store that has answered.

Files are looked at before etcd is dialled, because gRPC takes broken ones in silence, and an empty file of CAs for all
that the machine knows. So a mistake of the operator is one line that names the file.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

from agentreach.aio.tls import SYSTEM, Tls, TlsFileError, TlsFiles
from reach.adapters.certificates import CertificateUnusable, NodeCertificate
from reach.adapters.etcd import EtcdStore, parse_endpoints
from reach.adapters.memory_store import MemoryStore
from reach.core.store import Store, StoreUnavailable
from reach.node.settings import Config


async def make_store(config: Config) -> Store:
    """The registry store that the configuration names. Raises `StoreUnavailable` within about 6 s."""
    if config.registry == "memory":
        return MemoryStore()
    address = parse_endpoints(config.registry)
    try:
        return await EtcdStore.connect(
            address.endpoints,
            prefix=config.registry_prefix,
            tls=_tls(config, wanted=address.tls),
            user=config.registry_user or None,
            password=config.registry_password or None,
        )
    except (TlsFileError, CertificateUnusable) as error:
        raise StoreUnavailable(str(error)) from error


def _tls(config: Config, *, wanted: bool) -> Callable[[], Tls] | None:
    """What reads the files, which can be used now; None: in the clear."""
    files = TlsFiles(config.registry_tls_ca, config.registry_tls_cert, config.registry_tls_key)
    if not wanted and files == TlsFiles():
        return None
    if files.cert:
        NodeCertificate(files)
    else:
        _check_ca(files)
    return files.read


def _check_ca(files: TlsFiles) -> None:
    ca = files.read().ca
    if not files.ca or files.ca == SYSTEM:
        return
    try:
        ssl.create_default_context(cadata=ca.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise TlsFileError(f"{files.ca} holds no certificate that can be read") from error
