"""Django on Postgres (psycopg 3) or SQLite: the job belongs to `transaction.atomic()`."""

from django.db import connection, transaction
from invoice import PaymentRefused, invoice

from holdfast import submit_inside


def pay(order: int, *, fails: bool = False) -> None:
    with transaction.atomic():
        with connection.cursor() as cursor:  # or Order.objects.create(…)
            cursor.execute("INSERT INTO orders (id, state) VALUES (%s, 'paid')", [order])
        submit_inside(connection, [invoice(order)])
        if fails:
            raise PaymentRefused
