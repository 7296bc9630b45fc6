"""The outbox in the admin: rows that wait, and rows that need a decision. Rows cannot be added or changed."""

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from forq.contrib.django.outbox import discard, outbox_status, send_again
from forq.contrib.django.outbox_model import OutboxEntry
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

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """For users who may change entries."""
        return super().get_actions(request) if self.has_change_permission(request) else {}

    @admin.action(description="Send again (a job in doubt may run twice)")
    def send_again(self, request: HttpRequest, entries: "QuerySet[OutboxEntry]") -> None:
        count = send_again(self.alias, list(entries.values_list("pk", flat=True)))
        self.message_user(request, f"{count} entries wait again and will be sent.", messages.SUCCESS)

    @admin.action(description="Discard (in doubt and refused ones)")
    def discard(self, request: HttpRequest, entries: "QuerySet[OutboxEntry]") -> None:
        chosen = list(entries.values_list("pk", flat=True))
        count = discard(self.alias, chosen)
        left = "" if count == len(chosen) else " Entries that wait cannot be discarded."
        self.message_user(request, f"{count} entries were discarded.{left}", messages.SUCCESS)
