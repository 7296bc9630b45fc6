"""The outbox in the admin: rows that wait, and rows that need a decision. Rows cannot be added or changed."""

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from forq.contrib.django.models import OutboxEntry
from forq.contrib.django.outbox import discard, outbox_status, send_again
from forq.contrib.django.project import project_app
from forq.values import show_duration


@admin.register(OutboxEntry)
class OutboxAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # it is generic in the stubs only
    """Shows the outbox of the first database of FORQ["OUTBOX"]."""

    list_display = ("task", "job_id", "queue", "state", "created_at", "attempted_at", "short_error")
    list_filter = ("state", "queue", "task")
    search_fields = ("job_id", "task")
    ordering = ("pk",)
    actions = ("send_again", "discard")
    fields = (
        *("task", "job_id", "queue", "state", "error", "created_at", "attempted_at", "data"),
        *("priority", "token", "run_at", "options", "if_exists", "durable"),
    )
    readonly_fields = fields

    @property
    def alias(self) -> str:
        settings = project_app().outbox_settings
        return "default" if settings is None else settings.databases[0]

    def get_queryset(self, request: HttpRequest) -> "QuerySet[OutboxEntry]":
        # The page of a row loads its data: those of all rows of the list would be too much.
        return OutboxEntry.objects.using(self.alias).defer("body").order_by(*self.ordering)

    @admin.display(description="error")
    def short_error(self, entry: OutboxEntry) -> str:
        return entry.error if len(entry.error) <= 100 else entry.error[:97] + "..."

    @admin.display(description="identifier, task, data")
    def data(self, entry: OutboxEntry) -> str:
        return bytes(entry.body).decode(errors="replace")

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        status = outbox_status(self.alias)
        oldest = (
            "" if status.oldest is None else f", the oldest for {show_duration(round(status.oldest.total_seconds()))}"
        )
        title = f"Outbox: {status.waiting} waiting{oldest}; {status.in_doubt} in doubt, {status.refused} refused"
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """For the actions. Saving a row would undo what a delivery does to it at the same time."""
        return obj is None and super().has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """A row that waits may be on its way. The action discards the others."""
        return False

    def has_discard_permission(self, request: HttpRequest) -> bool:
        return super().has_delete_permission(request)

    @admin.action(description="Send again (a job in doubt may run twice)", permissions=["change"])
    def send_again(self, request: HttpRequest, entries: "QuerySet[OutboxEntry]") -> None:
        flagged = _flagged(entries)
        count = send_again(self.alias, [entry.pk for entry in flagged])
        _log(request, CHANGE, "Sent again.", flagged)
        self.message_user(request, f"{_entries(count)} will be sent again.", messages.SUCCESS)

    @admin.action(description="Discard (in doubt and refused ones)", permissions=["discard"])
    def discard(self, request: HttpRequest, entries: "QuerySet[OutboxEntry]") -> None:
        chosen, flagged = entries.count(), _flagged(entries)
        count = discard(self.alias, [entry.pk for entry in flagged])
        _log(request, DELETION, "Discarded.", flagged)
        left = "" if count == chosen else " Entries that wait cannot be discarded."
        self.message_user(request, f"Discarded {_entries(count)}.{left}", messages.SUCCESS)


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _flagged(entries: "QuerySet[OutboxEntry]") -> list[OutboxEntry]:
    return list(entries.exclude(state=OutboxEntry.WAITING))


def _log(request: HttpRequest, action: int, text: str, entries: list[OutboxEntry]) -> None:
    """Entries of the admin's history: who has decided about which job."""
    content_type = get_content_type_for_model(OutboxEntry)
    LogEntry.objects.bulk_create(
        LogEntry(
            user_id=request.user.pk,
            content_type_id=content_type.pk,
            object_id=str(entry.pk),
            object_repr=f"{entry} in queue {entry.queue}, {entry.state}"[:200],
            action_flag=action,
            change_message=text,
        )
        for entry in entries
    )
