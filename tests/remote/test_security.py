"""Who may call: certificates, tokens, allow-lists, rates."""

import datetime
import ipaddress

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fmoe_ext.remote import Busy, Credentials, ExpertGone, Refused, RemoteError, Security, Settings
from fmoe_ext.remote.security import Rates, host_of

X = torch.ones(2, 16)
QUICK = Settings(forward_timeout=2, backward_timeout=2, info_timeout=2, patience=0)


def certificate(folder, name, issuer=None):
    """(certificate, key) PEM files; signed by issuer, or by itself as an authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[2] if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
    )
    signed = builder.sign(issuer[3] if issuer else key, hashes.SHA256())
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return *paths, subject, key


def ask(directory, backward=True):
    (expert,) = directory.get_experts(["expert.0"])
    y = expert(X)
    if backward:
        y.sum().backward()
    return y


def test_tls(serve, tmp_path):
    ca = certificate(tmp_path, "ca")
    crt, key, *_ = certificate(tmp_path, "server", ca)
    security = Security(crt, key)
    ask(serve(QUICK, Credentials(ca[0]), security=security)[1])
    other = certificate(tmp_path, "other")
    for wrong in (None, Credentials(other[0])):
        with pytest.raises(ExpertGone):
            ask(serve(QUICK, wrong, security=security)[1])


def test_mutual_tls_and_allow_list_by_certificate(serve, tmp_path):
    ca = certificate(tmp_path, "ca")
    crt, key, *_ = certificate(tmp_path, "server", ca)
    security = Security(crt, key, client_ca=ca[0], backward=frozenset({"alice"}))
    alice, bob = certificate(tmp_path, "alice", ca), certificate(tmp_path, "bob", ca)
    ask(serve(QUICK, Credentials(ca[0], *alice[:2]), security=security)[1])
    directory = serve(QUICK, Credentials(ca[0], *bob[:2]), security=security)[1]
    ask(directory, backward=False)
    with pytest.raises(Refused, match="bob may not send gradients"):
        ask(directory)
    with pytest.raises(RemoteError):
        ask(serve(QUICK, Credentials(ca[0]), security=security)[1])


def test_tokens(serve):
    security = Security(tokens={"s3cret": "alice", "other": "bob"}, backward=frozenset({"alice"}))
    ask(serve(QUICK, Credentials(token="s3cret"), security=security)[1])
    with pytest.raises(Refused, match="bob may not"):
        ask(serve(QUICK, Credentials(token="other"), security=security)[1])
    for wrong in (None, "s3cre", "s3crets", ""):
        with pytest.raises(Refused, match="asks for a token"):
            ask(serve(QUICK, Credentials(token=wrong), security=security)[1])


def test_rate_of_a_peer(serve):
    """One call, and the next in two seconds: a client that cannot wait so long is told."""
    with pytest.raises(Busy, match="rate"):
        ask(serve(Settings(forward_timeout=1.0), security=Security(calls_per_second=0.5))[1])


def test_rates():
    rates = Rates(10)
    assert sum(rates.take("a", 1, now=0.0) for _ in range(30)) == 20  # two seconds' worth
    assert rates.take("b", 1, now=0.0)
    assert not rates.take("a", 1, now=0.05)
    assert rates.take("a", 1, now=0.11)
    assert rates.take("big", 1000, now=0.0)  # more than ever fits, when the bucket is full
    assert not rates.take("big", 1, now=1.0)


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="certificate and its key"):
        Security(certificate="x").server_credentials()
    with pytest.raises(ValueError, match="need TLS"):
        Security(client_ca="x").server_credentials()


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:42", "10.0.0.1"), ("ipv6:%5B::1%5D:42", "%5B::1%5D"), ("unix:/x", "unix:/x")],
)
def test_host_of(peer, host):
    assert host_of(peer) == host
