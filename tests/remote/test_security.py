"""Admission of calls: certificates, tokens, allow-lists, rates."""

import dataclasses
import datetime
import ipaddress
import types

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fmoe_ext.remote import Busy, Credentials, ExpertGone, Refused, RemoteError, Security, Settings
from fmoe_ext.remote.dht import Identity
from fmoe_ext.remote.security import Guard, Rates, host_of
from fmoe_ext.remote.server.main import make_server
from fmoe_ext.remote.server.options import parse, read_tokens
from tests.remote.conftest import PATIENT

X = torch.ones(2, 16)
QUICK = dataclasses.replace(PATIENT, patience=0)


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
    paths[1].chmod(0o600)
    return *paths, subject, key


def write_secret(path, text):
    path.write_text(text)
    path.chmod(0o600)
    return path


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
    for wrong, remedy in ((None, "Settings"), (Credentials(other[0]), "who signed the server's certificate")):
        with pytest.raises(ExpertGone, match=remedy):
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
        which = "a" if wrong is None else "another"
        with pytest.raises(Refused, match=f"asks for {which} token"):
            ask(serve(QUICK, Credentials(token=wrong), security=security)[1])


def test_tokens_of_a_file_are_taken_as_they_stand(tmp_path):
    """As JSON, the token 12e9999 was "inf", and 1e5 "100000.0"."""
    path = tmp_path / "tokens"
    write_secret(path, "# ours\nalice: 12e9999\nbob: 1e5 # a comment\ncarol: a:b\n")
    assert read_tokens(path) == {"12e9999": "alice", "1e5": "bob", "a:b": "carol"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        ("# nobody yet\n", "holds no token"),
        ("alice:\n", "tokens:1: .* an empty one would admit everybody"),
        ("alice: x\nbob: x\n", "tokens:2: bob has the token of alice"),
        ("alice x\n", "tokens:1: write `name: token`"),
    ],
)
def test_file_of_tokens_that_would_admit_others(text, message, tmp_path):
    """A server with an empty file of tokens asked nobody for one."""
    path = tmp_path / "tokens"
    write_secret(path, text)
    with pytest.raises(SystemExit, match=message):
        read_tokens(path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--own_token bob --tokens tokens --copies_of expert.0", "--own_token bob is no name in tokens"),
        (
            "--tls_certificate c --tls_key k --copies_of expert.0",
            "name who signed their certificates with --tls_ca",
        ),
    ],
)
def test_flags_by_which_servers_call_each_other(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_secret(tmp_path / "tokens", "alice: x\n")
    with pytest.raises(SystemExit, match=message):
        make_server(parse(flags.split()))


def test_certificate_that_is_none(tmp_path):
    """The server said that the port is in use."""
    junk = tmp_path / "junk"
    write_secret(junk, "hello")
    with pytest.raises(ValueError, match=r"junk and .*junk are not a certificate and its key in PEM"):
        Security(certificate=junk, key=junk).server_credentials()
    with pytest.raises(ValueError, match=r"ca .*junk holds no certificate in PEM"):
        Credentials(ca=junk).channel_credentials()
    crt, key, *_ = certificate(tmp_path, "server")
    with pytest.raises(ValueError, match=r"client_ca .*junk holds no certificate in PEM"):
        Security(crt, key, client_ca=junk).server_credentials()


def test_security_that_would_be_none():
    with pytest.raises(ValueError, match="token of alice is empty"):
        Security(tokens={"": "alice"})
    with pytest.raises(ValueError, match="calls_per_second must be positive, but is 0"):
        Security(calls_per_second=0)
    with pytest.raises(ValueError, match="give ca"):
        Credentials(certificate="c", key="k", token="would be sent in the clear")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_secrets_open_to_other_users_are_refused_by_name(tmp_path, mode):
    """Files with keys, tokens and identities were read whatever their mode."""
    crt, key, *_ = certificate(tmp_path, "server")
    tokens = write_secret(tmp_path / "tokens", "alice: x\n")
    identity = tmp_path / "identity"
    public = Identity.at(identity).public
    uses = {
        key: lambda: (
            Security(crt, key).server_credentials(),
            Credentials(ca=crt, certificate=crt, key=key).channel_credentials(),
        ),
        tokens: lambda: read_tokens(tokens),
        identity: lambda: Identity.at(identity),
    }
    for path, use in uses.items():
        use()
        path.chmod(mode)
        with pytest.raises((ValueError, SystemExit), match=rf"{path}.*\(mode {mode:04o}\): chmod 600"):
            use()
    with pytest.raises(ValueError, match="chmod 600"):
        Credentials(ca=crt, certificate=crt, key=key).channel_credentials()
    identity.chmod(0o600)
    assert Identity.at(identity).public == public


def test_rate_of_a_peer(serve):
    """One call, and the next in 50 seconds: a client that cannot wait so long gets Busy."""
    with pytest.raises(Busy, match="rate"):
        ask(serve(Settings(forward_timeout=5.0), security=Security(calls_per_second=0.02))[1])


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
    for half in ("certificate", "key"):  # grpc ended the process, without an exception
        with pytest.raises(ValueError, match="needs both a certificate and its key"):
            Credentials(ca="ca", **{half: "x"})


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:42", "10.0.0.1"),
        ("ipv6:%5B::1%5D:42", "::1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:42", "fe80::1%eth0"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:42", "10.0.0.1"),
        ("unix:/x", "unix:/x"),
    ],
)
def test_host_of(peer, host):
    assert host_of(peer) == host


@pytest.mark.parametrize(
    "peer", ["ipv4:10.0.0.1:42", "ipv6:%5B::ffff:10.0.0.1%5D:42", "ipv6:%5B2001:db8::7%5D:42"]
)
def test_address_that_may_send_gradients_is_let_in(peer):
    """Callers of a server on [::] had names such as %5B::ffff:10.0.0.1%5D, which no --allow_backward has."""
    guard = Guard(Security(backward=["10.0.0.1", "2001:db8::7"]))
    context = types.SimpleNamespace(peer=lambda: peer)
    assert guard.admit(context, 100, gradient=True) in ("10.0.0.1", "2001:db8::7")
