/* Takes commands from `cmd`, does what they say and acknowledges them in the log. How records are written is in records.c; the names
 * of keys, verbs and kinds, which Python shares, come from protocol.py.
 *
 * Every command carries a token, and one below the highest seen is refused. */
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
#define POLL_COMMANDS (250 * MS) /* without notices */
#define POLL_ANYWAY (1 * SECOND) /* with them: a missed notice, and a machine that slept */

uint64_t highest_token;
micros next_look;
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

/* Begin with a task, and leave out those before it. A command that was given before changes nothing. */
static const char *go_on(const struct command *c) {
    if (c->task < 0 || (size_t)c->task >= spec.task_count)
        return "there is no such task";
    if (c->task < held.next || (!held.on && c->task == held.next))
        return NULL;
    if (!held.on || held.go || held.end)
        return "not holding";
    held.next = (unsigned)c->task;
    held.go = true;
    return NULL;
}

/* End here, well, or with a text that says what failed. */
static const char *end_here(const struct command *c) {
    if (!held.on || held.go)
        return "not holding";
    held.end = true;
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

/* Put a folder of `space` in the place of the tree, which is kept as `was.NAME`: not by its name, or a repeated command would
 * bring it back. By us, who know the highest token: a worker that slept since it was the owner moves nothing. */
static const char *place(const struct command *c) {
    if (!held.on || held.go || held.end)
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
    if (!held.on || held.go || held.end)
        return "not holding";
    if (!stops)
        return start_service();
    if (service.pid)
        ask_service_to_end();
    return NULL;
}

static const char *beat(const struct command *c) {
    if (c->stop_after == NEVER)
        return "stop_after is missing";
    micros deadline = in_boottime(c->stop_after, c->wall_clock);
    if (spec.stop_after == NEVER || deadline > spec.stop_after)
        spec.stop_after = deadline; /* a beat that comes late takes nothing back */
    return NULL;
}

/* `fail`: it broke a limit that its owner watches; the text says which, and `exit` repeats it. */
static const char *stop_for(const struct command *c, micros grace) {
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

static const char *hold_on(const struct command *c) {
    (void)c; /* its token is all that counts */
    return NULL;
}

static const char *stop_gently(const struct command *c) { return stop_for(c, c->grace == NEVER ? spec.stop_grace : c->grace); }
static const char *stop_at_once(const struct command *c) { return stop_for(c, 0); }

static const struct {
    const char *verb;
    const char *(*obey)(const struct command *);
} VERBS[] = {{VERB_HOLD, hold_on}, {VERB_BEAT, beat},    {VERB_STOP, stop_gently}, {VERB_KILL, stop_at_once},
             {VERB_GO, go_on},     {VERB_END, end_here}, {VERB_PLACE, place},      {VERB_SERVICE, command_service}};
_Static_assert(COUNT_OF(VERBS) == VERB_COUNT, "a verb of protocol.py is missing");

/* Do what a command says. The answer is why not, or NULL. */
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

/* A file that an engine is still unpacking ends too early, or is not ours yet; it gets a moment. */
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
        return; /* obeyed again and again it would be worse than not at all */
    const char *refused = parsed == END ? obey(&c) : why;
    acknowledge(name, &c, refused);
}

static int by_name(const void *a, const void *b) { return strcmp(a, b); }

/* Commands in the order of their names. */
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

void look_for_commands(bool noticed) {
    micros now = boottime();
    if (!noticed && now < next_look)
        return;
    take_commands();
    next_look = now + (watched >= 0 ? POLL_ANYWAY : POLL_COMMANDS);
}

/* Directory notification by SIGIO. inotify would do, but a user may have only 128 of it, and every attempt would take one
 * from everything else that runs as this user. */
void watch_commands(void) {
    mkdirat(folder, "cmd", 0700);
    watched = openat(folder, "cmd", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (watched >= 0 && fcntl(watched, F_NOTIFY, DN_CREATE | DN_RENAME | DN_MODIFY | DN_ATTRIB | DN_MULTISHOT) < 0)
        close_fd(&watched);
}
