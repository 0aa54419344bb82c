/* Reads commands from the folder `cmd`, carries them out and acknowledges them in the log. The format is parsed in records.c. The
 * names of keys, verbs and kinds come from protocol.py, which Python shares.
 *
 * Every command carries a token. A command whose token is lower than the highest seen is refused. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "attempt.h"
#include "commands.h"
#include "files.h"
#include "log.h"
#include "protocol.h"
#include "records.h"
#include "service.h"
#include "spec.h"
#include "stop.h"
#include "tasks.h"
#include "text.h"

#define MAX_COMMAND 4096u
#define COMMANDS_PER_PASS 64
#define TORN_COMMAND (2 * SECOND)
#define POLL_COMMANDS (250 * MS) /* if the kernel sends no notifications */
#define POLL_ANYWAY (1 * SECOND) /* if it does: a notification may be missed, and the machine may sleep */

uint64_t highest_token;
micros next_poll;
static int watched = -1;

struct command {
    char *verb, *kind, *name, *text;
    uint64_t token;
    int64_t task;
    micros grace, stop_after;
    bool wall_clock;
};

static const struct key COMMAND_KEYS[] = {
    {COMMAND_KEY_VERB, set_word, offsetof(struct command, verb)},
    {COMMAND_KEY_KIND, set_word, offsetof(struct command, kind)},
    {COMMAND_KEY_TOKEN, set_count, offsetof(struct command, token)},
    {COMMAND_KEY_GRACE, set_duration, offsetof(struct command, grace)},
    {COMMAND_KEY_STOP_AFTER, set_deadline, offsetof(struct command, stop_after)},
    {COMMAND_KEY_CLOCK, set_clock, offsetof(struct command, wall_clock)},
    {COMMAND_KEY_TASK, set_id, offsetof(struct command, task)},
    {COMMAND_KEY_NAME, set_word, offsetof(struct command, name)},
    {COMMAND_KEY_TEXT, set_word, offsetof(struct command, text)},
};
_Static_assert(COUNT_OF(COMMAND_KEYS) == COMMAND_KEY_COUNT, "a key of protocol.py is missing");

static enum parse parse_command(char *data, size_t length, struct command *c, char *why, size_t room) {
    struct records records = {.at = data, .left = length};
    struct record r;
    enum parse parsed = take_title(&records, COMMAND_TITLE, why, room);
    while (parsed == RECORD) {
        parsed = take_record(&records, &r);
        if (parsed == RECORD && !take_key(COMMAND_KEYS, COUNT_OF(COMMAND_KEYS), c, &r)) {
            snprintf(why, room, "%.40s cannot be used", r.key);
            return MALFORMED;
        }
    }
    if (parsed != END && !*why)
        snprintf(why, room, parsed == TORN ? "it ends too early" : "not in records");
    return parsed;
}

/* `go`: run this task next and skip those before it. A repeated command changes nothing. */
static const char *command_go(const struct command *c) {
    if (c->task < 0 || (size_t)c->task >= spec.task_count)
        return "there is no such task";
    if (c->task < boundary.next || (!boundary.waiting && c->task == boundary.next))
        return NULL;
    if (!boundary.waiting || boundary.go || boundary.end)
        return "not holding";
    boundary.next = (unsigned)c->task;
    boundary.go = true;
    return NULL;
}

/* `end`: end the attempt here as a success, or as a failure if there is a text. */
static const char *command_end(const struct command *c) {
    if (!boundary.waiting || boundary.go)
        return "not holding";
    boundary.end = true;
    if (c->text && !stop_state.reason) {
        snprintf(failure, sizeof failure, "%s", c->text);
        stop_state.reason = CAUSE_FAILED;
        stop_state.by = "command";
    }
    return NULL;
}

static bool plain_name(const char *name) {
    return *name && *name != '.' && !strchr(name, '/');
}

/* `place`: replace `tree` by another folder of `space`. The old tree becomes `was.NAME`; under its own name, a repeated command
 * would bring it back. The supervisor does this, because it knows the highest token: a worker that lost its lease while it was
 * suspended cannot replace anything. */
static const char *command_place(const struct command *c) {
    if (!boundary.waiting || boundary.go || boundary.end)
        return "not holding";
    if (service.pid)
        return "the service runs";
    if (!c->name || !plain_name(c->name) || strcmp(c->name, "tree") == 0 || strlen(c->name) > 200)
        return "name is missing, or not plain";
    char was[256];
    snprintf(was, sizeof was, "was.%s", c->name);
    int space = openat(folder, "space", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    struct stat about;
    const char *why = NULL;
    if (space < 0 || fstatat(space, c->name, &about, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISDIR(about.st_mode))
        why = "there is no such folder";
    else if (renameat(space, "tree", space, was) < 0 && errno != ENOENT)
        why = "the tree cannot be moved";
    else if (renameat(space, c->name, space, "tree") < 0) {
        why = "the folder cannot be moved";
        renameat(space, was, space, "tree");
    }
    close_fd(&space);
    if (!why) {
        put_field(event("placed"), "name", c->name);
        send_event();
    }
    return why;
}

static bool is_kind(const struct command *c, const char *kind) { return c->kind && strcmp(c->kind, kind) == 0; }

static const char *command_service(const struct command *c) {
    bool stops = is_kind(c, SERVICE_KIND_STOP);
    if (!stops && !is_kind(c, SERVICE_KIND_START))
        return "unknown kind";
    if (!spec.service.name)
        return "there is no service";
    if (!boundary.waiting || boundary.go || boundary.end)
        return "not holding";
    if (!stops)
        return start_service();
    if (service.pid)
        ask_service_to_end();
    return NULL;
}

static const char *command_beat(const struct command *c) {
    if (c->stop_after == NEVER)
        return "stop_after is missing";
    micros deadline = to_boottime(c->stop_after, c->wall_clock);
    if (spec.stop_after == NEVER || deadline > spec.stop_after)
        spec.stop_after = deadline; /* a late beat does not shorten the deadline */
    return NULL;
}

/* Begin the stop sequence. Kind `fail`: the attempt broke a limit that the worker checks; the text names it and goes into `exit`. */
static const char *stop_as_asked(const struct command *c, micros grace) {
    bool interrupts = is_kind(c, STOP_KIND_INTERRUPT), fails = is_kind(c, STOP_KIND_FAIL);
    if (c->kind && !interrupts && !fails && !is_kind(c, STOP_KIND_CANCEL))
        return "unknown kind";
    if (fails && !c->text)
        return "text is missing";
    bool before = stop_state.reason != CAUSE_NONE;
    stop(fails ? CAUSE_FAILED : interrupts ? CAUSE_INTERRUPTED : CAUSE_CANCELLED, "command", grace);
    if (fails && !before && stop_state.reason == CAUSE_FAILED)
        snprintf(failure, sizeof failure, "%s", c->text);
    return NULL;
}

static const char *command_hold(const struct command *c) {
    (void)c; /* it only raises the highest token */
    return NULL;
}

static const char *command_stop(const struct command *c) {
    return stop_as_asked(c, c->grace == NEVER ? spec.stop_grace : c->grace);
}

static const char *command_kill(const struct command *c) { return stop_as_asked(c, 0); }

static const struct {
    const char *verb;
    const char *(*obey)(const struct command *);
} VERBS[] = {
    {VERB_HOLD, command_hold}, {VERB_BEAT, command_beat}, {VERB_STOP, command_stop},   {VERB_KILL, command_kill},
    {VERB_GO, command_go},     {VERB_END, command_end},   {VERB_PLACE, command_place}, {VERB_SERVICE, command_service},
};
_Static_assert(COUNT_OF(VERBS) == VERB_COUNT, "a verb of protocol.py is missing");

/* Carry out a command. Return why it was refused, or NULL. */
static const char *obey(const struct command *c) {
    if (!c->token || !c->verb)
        return "verb or token is missing";
    if (c->token < highest_token)
        return "stale token";
    for (size_t i = 0; i < COUNT_OF(VERBS); i++)
        if (strcmp(c->verb, VERBS[i].verb) == 0) {
            const char *why = VERBS[i].obey(c);
            highest_token = why ? highest_token : c->token;
            return why;
        }
    return "unknown verb";
}

static void acknowledge(const char *name, const struct command *c, const char *why) {
    struct text *t = event("ack");
    put_field(t, "command", name);
    char verb[40] = "";
    snprintf(verb, sizeof verb, "%.39s", c->verb ? c->verb : "");
    put_field(t, "verb", verb);
    put(t, ",\"ok\":%s,\"token\":%" PRIu64 ",\"highest_token\":%" PRIu64, why ? "false" : "true", c->token, highest_token);
    put_field(t, "why", why ? why : "");
    put_field(t, "reason", stop_state.reason ? CAUSES[stop_state.reason] : "");
    if (spec.stop_after != NEVER)
        put(t, ",\"stop_after\":%" PRId64, spec.stop_after);
    send_event();
}

/* A file that an engine is still unpacking may be incomplete or not readable yet: try it again for a moment. */
static bool still_being_written(const struct stat *about) {
    micros changed = (micros)about->st_ctim.tv_sec * SECOND + about->st_ctim.tv_nsec / 1000, age = walltime() - changed;
    return age > -TORN_COMMAND && age < TORN_COMMAND;
}

static void take_command(int commands, const char *name) {
    char data[MAX_COMMAND], why[120] = "";
    struct command c = {.grace = NEVER, .stop_after = NEVER, .task = -1};
    struct stat about;
    enum parse parsed = MALFORMED;
    int fd = openat(commands, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT)
        return;
    if (fd < 0 && errno == EACCES && fstatat(commands, name, &about, AT_SYMLINK_NOFOLLOW) == 0 && still_being_written(&about))
        return;
    if (fd < 0 || fstat(fd, &about) < 0 || !S_ISREG(about.st_mode)) {
        snprintf(why, sizeof why, "not a file that can be read");
    } else if (about.st_size > (off_t)sizeof data) {
        snprintf(why, sizeof why, "larger than %u bytes", MAX_COMMAND);
    } else {
        ssize_t n = read_fd(fd, data, sizeof data);
        parsed = parse_command(data, n < 0 ? 0 : (size_t)n, &c, why, sizeof why);
        if (parsed == TORN && still_being_written(&about)) {
            close(fd);
            return;
        }
    }
    close_fd(&fd);
    if (unlinkat(commands, name, 0) < 0 && unlinkat(commands, name, AT_REMOVEDIR) < 0)
        return; /* a command that cannot be removed would be carried out again and again */
    const char *refused = parsed == END ? obey(&c) : why;
    acknowledge(name, &c, refused);
}

static int by_name(const void *a, const void *b) { return strcmp(a, b); }

/* Read the commands in the order of their names. */
static void take_commands(void) {
    static char names[COMMANDS_PER_PASS][NAME_MAX + 1];
    size_t count = 0;
    int fd = openat(folder, "cmd", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    DIR *commands = fd < 0 ? NULL : fdopendir(fd);
    if (!commands) {
        close_fd(&fd);
        return;
    }
    for (struct dirent *entry; count < COMMANDS_PER_PASS && (entry = readdir(commands));) {
        size_t length = strlen(entry->d_name);
        bool temporary = length >= 4 && strcmp(entry->d_name + length - 4, ".tmp") == 0;
        if (entry->d_name[0] != '.' && !temporary && length <= NAME_MAX)
            memcpy(names[count++], entry->d_name, length + 1);
    }
    qsort(names, count, sizeof *names, by_name);
    for (size_t i = 0; i < count; i++)
        take_command(fd, names[i]);
    closedir(commands);
}

void poll_commands(bool noticed) {
    micros now = boottime();
    if (!noticed && now < next_poll)
        return;
    take_commands();
    next_poll = now + (watched >= 0 ? POLL_ANYWAY : POLL_COMMANDS);
}

/* Use directory notification by SIGIO. A user may have only 128 inotify instances, and each attempt would take one away from the
 * other programs of this user. */
void watch_commands(void) {
    mkdirat(folder, "cmd", 0700);
    watched = openat(folder, "cmd", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (watched >= 0 && fcntl(watched, F_NOTIFY, DN_CREATE | DN_RENAME | DN_MODIFY | DN_ATTRIB | DN_MULTISHOT) < 0)
        close_fd(&watched);
}
