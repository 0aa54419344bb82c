"""The job that every example submits."""

from typing import Any


def invoice(order: int) -> dict[str, Any]:
    return {"runner": "process", "spec": {"command": ["make-invoice", str(order)]}, "labels": {"order": str(order)}}


class PaymentRefused(Exception):
    """Something of your own that goes wrong after the submit, and rolls back the transaction."""
