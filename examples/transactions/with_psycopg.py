"""psycopg 3: the job belongs to `connection.transaction()`, synchronous or asynchronous."""

from typing import Any

import psycopg
from invoice import PaymentRefused, invoice

from holdfast import submit_inside, submit_inside_async


def pay(connection: psycopg.Connection[Any], order: int, *, fails: bool = False) -> None:
    with connection.transaction():
        connection.execute("INSERT INTO orders (id, state) VALUES (%s, 'paid')", [order])
        submit_inside(connection, [invoice(order)])
        if fails:
            raise PaymentRefused


async def pay_async(connection: psycopg.AsyncConnection[Any], order: int, *, fails: bool = False) -> None:
    async with connection.transaction():
        await connection.execute("INSERT INTO orders (id, state) VALUES (%s, 'paid')", [order])
        await submit_inside_async(connection, [invoice(order)])
        if fails:
            raise PaymentRefused
