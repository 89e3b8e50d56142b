"""The gate in front of the server: nginx passes the few paths that a client's node needs, and nothing else.

Flower's SuperLink answers clients and its operator on one port, and asks the operator for no password: whoever reaches
that port can register a node or start a run. So SuperLink listens on the loopback address only, and what the network
sees is nginx, which knows ten exact paths. Registering a node is not among them.

Who shows no registered key is sent away before a byte of the body is read. A body has at most 8 MiB, is taken into
memory whole before SuperLink hears of it, and must not dawdle; so nobody outside can fill SuperLink's memory or use up
its connections.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

FLEET_PATHS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
STRANGERS = "strangers.log"
_CONNECTIONS = 256  # of one address at a time: a site with many devices has one, and so has an attacker
_OF_A_CLIENT = 16  # requests at a time: it needs a few, and each may lay 8 MiB into memory
SELF_REGISTRATION = ("register-node", "unregister-node")  # only where node authentication was switched off

_CONFIGURATION = """\
daemon off;
pid "{folder}/nginx.pid";
error_log "{folder}/error.log" warn;
worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  # One line a request: when, what it was, its size each way as it was on the wire (inside TLS), whose, from where.
  log_format fleet '$time_iso8601 $status $uri $request_length $bytes_sent $client $remote_addr';
  access_log "{folder}/access.log" fleet;
  map_hash_bucket_size 1024;
  map_hash_max_size 65536;
  map $http_flwr_public_key $client {{
    default "";
{keys}
  }}
  # And one for each whom this gate sent away for a key that it does not know: `deploy status` tells of them.
  map "$status$client" $unknown {{ default 0; "401" 1; }}
  log_format unknown '$time_iso8601 $remote_addr $http_flwr_public_key';
  access_log "{folder}/{strangers}" unknown if=$unknown;
  limit_conn_zone $binary_remote_addr zone=addresses:10m;
  limit_conn_zone $client zone=clients:10m;
  limit_conn_status 503;
  server_tokens off;
  client_body_temp_path "{folder}/body";
  proxy_temp_path "{folder}/proxy";
  fastcgi_temp_path "{folder}/fastcgi";
  uwsgi_temp_path "{folder}/uwsgi";
  scgi_temp_path "{folder}/scgi";
  upstream superlink {{ server 127.0.0.1:{inner_port}; keepalive 32; }}
  server {{
    listen {address}:{port}{ssl};
{tls}
    client_max_body_size 8m;       # arrays travel in pieces of 5 MiB
    client_body_buffer_size 8m;    # in memory: updates are never laid down on this disk
    client_header_timeout 10s;
    client_body_timeout 15s;       # between two pieces of a body
    send_timeout 30s;
    keepalive_timeout 65s;
    lingering_time 5s;
    lingering_timeout 2s;
    reset_timedout_connection on;
    limit_conn addresses {connections};
    limit_conn clients {of_a_client};
    proxy_buffering off;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_read_timeout 120s;
{locations}
    location / {{ return 404; }}
  }}
}}
"""

_TLS = """\
    ssl_certificate "{server}/server.crt";
    ssl_certificate_key "{server}/server.key";
    ssl_protocols TLSv1.2 TLSv1.3;
    proxy_ssl_trusted_certificate "{server}/inner/ca.crt";
    proxy_ssl_verify on;
    proxy_ssl_name localhost;"""

# The path is written out on both sides, so no spelling of a request can become another path behind the gate.
_LOCATION = """\
    location = /v1/fleet/{path} {{
      limit_except POST {{ deny all; }}{known}
      proxy_pass {scheme}://superlink/v1/fleet/{path};
    }}"""


def find_nginx() -> str:
    """Where nginx is, or a sentence about how to get it."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
    if found is None:
        raise FileNotFoundError(
            "nginx is not installed, and without it nothing bounds what strangers send to the port that clients reach, "
            "how slowly, and over how many connections; install it (for example `apt install nginx-light` or "
            "`brew install nginx`) and try again"
        )
    return found


def configuration(
    folder: Path,
    server: Path,
    address: str,
    port: int,
    inner_port: int,
    tls: bool,
    authentication: bool,
    keys: Mapping[str, str] | None = None,
) -> str:
    """The text of nginx's configuration; `keys` has each client's public key as requests bear it.

    >>> text = configuration(Path("n"), Path("s"), "0.0.0.0", 8443, 9001, tls=True, authentication=True)
    >>> "listen 0.0.0.0:8443 ssl;" in text, "/v1/fleet/pull-messages" in text, "register" in text, "control" in text
    (True, True, False, False)
    """
    paths = FLEET_PATHS if authentication else FLEET_PATHS + SELF_REGISTRATION
    scheme = "https" if tls else "http"
    known = '\n      if ($client = "") { return 401; }' if authentication else ""
    return _CONFIGURATION.format(
        folder=folder,
        strangers=STRANGERS,
        address=address,
        port=port,
        inner_port=inner_port,
        connections=_CONNECTIONS,
        of_a_client=_OF_A_CLIENT,
        keys="\n".join(f'    "{key}" "{name}";' for name, key in (keys or {}).items()),
        ssl=" ssl" if tls else "",
        tls=_TLS.format(server=server) if tls else "",
        locations="\n".join(_LOCATION.format(path=path, scheme=scheme, known=known) for path in paths),
    )
