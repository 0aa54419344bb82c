"""SQLAlchemy 2: the job belongs to the transaction of the session, synchronous or asynchronous."""

from invoice import PaymentRefused, invoice
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from holdfast import submit_inside, submit_inside_async


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


def pay(engine: Engine, order: int, *, fails: bool = False) -> None:
    with Session(engine) as session, session.begin():
        session.add(Order(id=order, state="paid"))
        submit_inside(session, [invoice(order)])
        if fails:
            raise PaymentRefused


async def pay_async(engine: AsyncEngine, order: int, *, fails: bool = False) -> None:
    async with AsyncSession(engine) as session, session.begin():
        session.add(Order(id=order, state="paid"))
        await submit_inside_async(session, [invoice(order)])
        if fails:
            raise PaymentRefused
