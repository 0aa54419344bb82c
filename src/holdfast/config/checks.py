"""Settings that contradict each other, or that cannot work: every problem with what to do about it."""

import ipaddress
import os
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.limits import NAMES, SETTINGS

if TYPE_CHECKING:
    from holdfast.config.settings import Settings

MOST_DEPTH = 500
"""Databases and JSON parsers fail at depths of about a thousand."""
MOST_ATTEMPTS = 1000


def loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _malformed(settings: "Settings") -> list[str]:
    """Return a problem for each database URL that cannot be parsed."""
    problems = []
    for name, url in (("HOLDFAST_DATABASE_URL", settings.database_url), ("HOLDFAST_LISTEN_URL", settings.listen_url)):
        try:
            _ = url and urlsplit(url).port
        except ValueError as error:
            problems.append(f"{name} is not a URL ({error}): use sqlite:///path or postgresql://host:port/name")
    return problems


def _open_to_strangers(settings: "Settings") -> list[str]:
    """Return the problems of a service without tokens that others could reach."""
    problems = []
    if settings.auth == "off" and not loopback(settings.host):
        problems.append(
            f"HOLDFAST_AUTH is off and HOLDFAST_HOST is {settings.host}, which others may reach: "
            "turn it on, or listen on 127.0.0.1"
        )
    if settings.auth == "off" and os.geteuid() == 0 and not settings.auth_off_as_root:
        problems.append(
            "HOLDFAST_AUTH is off and this is root: every job on this machine could become root through the service. "
            "Run as another user, turn it on, or set HOLDFAST_AUTH_OFF_AS_ROOT=true if all jobs are trusted"
        )
    return problems


def _above_ceilings(settings: "Settings") -> list[str]:
    """Return a problem for each default that is above its ceiling."""
    limits = settings.attempt_limits
    found = [(name, getattr(limits.default, name), getattr(limits.most, name)) for name in NAMES]
    return [
        f"{SETTINGS[name]} is {default}, more than {SETTINGS[name]}_MAX ({most}): lower it, or raise the ceiling"
        for name, default, most in found
        if default is not None and most is not None and default > most
    ]


def contradictions(settings: "Settings") -> list[str]:
    problems = _above_ceilings(settings)
    if settings.heartbeat_interval > settings.lease_ttl / 3:
        problems.append(
            f"HOLDFAST_HEARTBEAT_INTERVAL is {settings.heartbeat_interval:g} s; it may be at most a third of "
            f"HOLDFAST_LEASE_TTL ({settings.lease_ttl:g} s), that is {settings.lease_ttl / 3:g} s"
        )
    if settings.backoff_base > settings.backoff_cap:
        problems.append(
            f"HOLDFAST_BACKOFF_BASE is {settings.backoff_base:g} s, more than "
            f"HOLDFAST_BACKOFF_CAP ({settings.backoff_cap:g} s)"
        )
    if settings.max_attempts > MOST_ATTEMPTS:
        problems.append(f"HOLDFAST_MAX_ATTEMPTS is {settings.max_attempts}; at most {MOST_ATTEMPTS} are accepted")
    problems += _malformed(settings)
    if problems:
        return problems  # The checks below parse the URLs.
    if settings.database_url is not None:
        scheme = urlsplit(settings.database_url).scheme
        if scheme not in ("sqlite", "postgres", "postgresql"):
            problems.append(
                f"HOLDFAST_DATABASE_URL starts with {scheme or 'nothing'!r}: use sqlite:///path or postgresql://host/name"
            )
    if urlsplit(settings.url).scheme == "sqlite" and (settings.pooler != "none" or settings.listen_url):
        problems.append("HOLDFAST_POOLER and HOLDFAST_LISTEN_URL are for Postgres, and HOLDFAST_DATABASE_URL is not")
    if settings.listen_url is not None and urlsplit(settings.listen_url).scheme not in ("postgres", "postgresql"):
        problems.append("HOLDFAST_LISTEN_URL is not a URL of Postgres: use postgresql://host/name")
    if settings.pooler != "none" and settings.listen_url == settings.url:
        problems.append("HOLDFAST_LISTEN_URL leads to the pooler, where LISTEN does not work: use Postgres's own URL")
    if settings.docker_host is not None and not re.match(r"(unix:///|(tcp|http|https)://[^/])", settings.docker_host):
        problems.append(f"HOLDFAST_DOCKER_HOST is {settings.docker_host!r}: use unix:///path, tcp://host:port or none")
    problems += _open_to_strangers(settings)
    if settings.max_json_depth > MOST_DEPTH:
        problems.append(f"HOLDFAST_MAX_JSON_DEPTH is {settings.max_json_depth}; at most {MOST_DEPTH} can be kept")
    if not settings.schema.isidentifier() or len(settings.schema) > 60:
        problems.append(f"HOLDFAST_SCHEMA is {settings.schema!r}: use letters, digits and underscores")
    return problems
