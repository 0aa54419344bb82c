"""Settings: four sources in order, and every problem at once."""

import dataclasses
from pathlib import Path

import pytest

from holdfast.config import Settings, load
from holdfast.errors import ConfigError


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('lease_ttl = 120\npoll_interval = 7\nreaper_interval = 9\nschema = "a"\n')
    environment = {"HOLDFAST_CONFIG": str(file), "HOLDFAST_POLL_INTERVAL": "8", "HOLDFAST_REAPER_INTERVAL": "10"}
    settings = load({"reaper_interval": 11, "schema": None}, environment)
    assert (settings.heartbeat_interval, settings.lease_ttl) == (15, 120)
    assert (settings.poll_interval, settings.reaper_interval, settings.schema) == (8, 11, "a")


def test_database_url_is_found_where_platforms_put_it() -> None:
    assert load(environment={"DATABASE_URL": "postgresql://h/a"}).url == "postgresql://h/a"
    both = {"DATABASE_URL": "postgresql://h/a", "HOLDFAST_DATABASE_URL": "postgresql://h/b"}
    assert load(environment=both).url == "postgresql://h/b"
    assert load(environment={"HOLDFAST_DATA_DIR": "/srv/x"}).url == "sqlite:////srv/x/holdfast.db"


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    """Proves L5."""
    file = tmp_path / "holdfast.toml"
    file.write_text("colour = 1\n")
    environment = {
        "HOLDFAST_CONFIG": str(file),
        "HOLDFAST_POLL_INTERVAL": "often",
        "HOLDFAST_MAX_ATTEMPTS": "1.5",
        "HOLDFAST_LEASE_TTL": "30",
        "HOLDFAST_HEARTBEAT_INTERVAL": "11",
        "HOLDFAST_BACKOFF_BASE": "500",
        "HOLDFAST_LISTEN": "perhaps",
        "HOLDFAST_STOP_GRACE": "-1",
    }
    with pytest.raises(ConfigError) as caught:
        load(environment=environment)
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 7
    names = ("colour", "POLL_INTERVAL", "MAX_ATTEMPTS", "HEARTBEAT_INTERVAL", "BACKOFF_BASE", "LISTEN", "STOP_GRACE")
    assert [name for name in names if name not in problems] == []
    assert "at most a third of HOLDFAST_LEASE_TTL (30 s), that is 10 s" in problems


def test_unreadable_file_is_a_problem_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(environment={"HOLDFAST_CONFIG": str(tmp_path / "none.toml")})
    (tmp_path / "bad.toml").write_text("a = = b")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(environment={"HOLDFAST_CONFIG": str(tmp_path / "bad.toml")})


def test_every_setting_says_what_it_is() -> None:
    for field in dataclasses.fields(Settings):
        assert field.metadata["about"], field.name


def test_pooler_and_listen_url_must_fit_the_database() -> None:
    pooled = {"HOLDFAST_DATABASE_URL": "postgresql://pooler/a", "HOLDFAST_POOLER": "transaction"}
    settings = load(environment={**pooled, "HOLDFAST_LISTEN_URL": "postgresql://db/a"})
    assert (settings.pooler, settings.listen_url) == ("transaction", "postgresql://db/a")
    for wrong, message in [
        ({**pooled, "HOLDFAST_POOLER": "statement"}, "must be none or transaction"),
        ({**pooled, "HOLDFAST_LISTEN_URL": "postgresql://pooler/a"}, "LISTEN_URL leads to the pooler"),
        ({**pooled, "HOLDFAST_LISTEN_URL": "sqlite:///a"}, "LISTEN_URL is not a URL of Postgres"),
        ({**pooled, "HOLDFAST_DATABASE_URL": "sqlite:///a"}, "are for Postgres"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(environment=wrong)
