"""asyncpg: the job belongs to `connection.transaction()`."""

from typing import Any

from invoice import PaymentRefused, invoice

from holdfast import submit_inside_async


async def pay(connection: Any, order: int, *, fails: bool = False) -> None:
    async with connection.transaction():
        await connection.execute("INSERT INTO orders (id, state) VALUES ($1, 'paid')", order)
        await submit_inside_async(connection, [invoice(order)])
        if fails:
            raise PaymentRefused
