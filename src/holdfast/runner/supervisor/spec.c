/* Reads and checks `spec`: its keys, and which of them are required. The format is parsed in records.c. The names of the keys come
 * from protocol.py, which Python shares. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "attempt.h"
#include "files.h"
#include "records.h"
#include "spec.h"

const struct limit LIMITS[] = {
    {LIMIT_AS, RLIMIT_AS},       {LIMIT_CORE, RLIMIT_CORE},     {LIMIT_CPU, RLIMIT_CPU},     {LIMIT_DATA, RLIMIT_DATA},
    {LIMIT_FSIZE, RLIMIT_FSIZE}, {LIMIT_NOFILE, RLIMIT_NOFILE}, {LIMIT_NPROC, RLIMIT_NPROC}, {LIMIT_STACK, RLIMIT_STACK},
};
_Static_assert(COUNT_OF(LIMITS) == LIMIT_COUNT, "a limit of protocol.py is missing");

struct spec spec = {
    .stop_signal = SIGTERM,
    .uid = -1,
    .gid = -1,
    .umask = 077,
    .timeout = NEVER,
    .idle_timeout = NEVER,
    .stop_grace = 5 * SECOND,
    .drain = SECOND,
    .start_by = NEVER,
    .stop_after = NEVER,
};
static char *file; /* the bytes of `spec`; its strings point into them */

static bool set_umask(char *text, void *into) {
    char *end;
    long n = strtol(text, &end, 8);
    *(int *)into = (int)n;
    return *text >= '0' && *text <= '7' && !*end && n >= 0 && n <= 0777;
}

static bool set_groups(char *text, void *into) {
    struct spec *s = into;
    for (char *save = NULL, *one = strtok_r(text, " ", &save); one; one = strtok_r(NULL, " ", &save)) {
        uint64_t id;
        if (s->group_count == COUNT_OF(s->groups) || !parse_number(one, UINT32_MAX - 1, &id))
            return false;
        s->groups[s->group_count++] = (gid_t)id;
    }
    return true;
}

static bool set_limit(char *text, void *into) {
    struct spec *s = into;
    char *space = strchr(text, ' ');
    uint64_t value;
    if (!space || !parse_number(space + 1, INT64_MAX, &value))
        return false;
    *space = 0;
    for (size_t i = 0; i < LIMIT_COUNT; i++)
        if (strcmp(text, LIMITS[i].name) == 0) {
            s->limited[i] = true;
            s->limits[i] = (rlim_t)value;
            return true;
        }
    return false;
}

static const struct key SPEC_KEYS[] = {
    {SPEC_KEY_TOKEN, set_count, offsetof(struct spec, token)},
    {SPEC_KEY_MARK, set_word, offsetof(struct spec, mark)},
    {SPEC_KEY_ENV, set_entry, offsetof(struct spec, env)},
    {SPEC_KEY_CWD, set_folder, offsetof(struct spec, cwd)},
    {SPEC_KEY_UID, set_id, offsetof(struct spec, uid)},
    {SPEC_KEY_GID, set_id, offsetof(struct spec, gid)},
    {SPEC_KEY_GROUPS, set_groups, 0},
    {SPEC_KEY_UMASK, set_umask, offsetof(struct spec, umask)},
    {SPEC_KEY_NO_NEW_PRIVS, set_flag, offsetof(struct spec, no_new_privs)},
    {SPEC_KEY_SOLE_USER, set_flag, offsetof(struct spec, sole_user)},
    {SPEC_KEY_PRIVATE, set_flag, offsetof(struct spec, private_view)},
    {SPEC_KEY_LIMIT, set_limit, 0},
    {SPEC_KEY_OUTPUT_CAP, set_count, offsetof(struct spec, cap)},
    {SPEC_KEY_TIMEOUT, set_duration, offsetof(struct spec, timeout)},
    {SPEC_KEY_IDLE_TIMEOUT, set_duration, offsetof(struct spec, idle_timeout)},
    {SPEC_KEY_STOP_GRACE, set_duration, offsetof(struct spec, stop_grace)},
    {SPEC_KEY_DRAIN, set_duration, offsetof(struct spec, drain)},
    {SPEC_KEY_CLOCK, set_clock, offsetof(struct spec, wall_clock)},
    {SPEC_KEY_HOLD, set_flag, offsetof(struct spec, hold)},
    {SPEC_KEY_STOP_SIGNAL, set_id, offsetof(struct spec, stop_signal)},
    {SPEC_KEY_START_BY, set_deadline, offsetof(struct spec, start_by)},
    {SPEC_KEY_STOP_AFTER, set_deadline, offsetof(struct spec, stop_after)},
};
_Static_assert(COUNT_OF(SPEC_KEYS) == SPEC_KEY_COUNT, "a key of protocol.py is missing");

static const struct key TASK_KEYS[] = {
    {TASK_KEY_ARG, set_argument, offsetof(struct task, argv)},
    {TASK_KEY_ENV, set_entry, offsetof(struct task, env)},
    {TASK_KEY_CWD, set_folder, offsetof(struct task, cwd)},
    {TASK_KEY_TIMEOUT, set_duration, offsetof(struct task, timeout)},
};
_Static_assert(COUNT_OF(TASK_KEYS) == TASK_KEY_COUNT, "a key of protocol.py is missing");

static bool add_task(struct record *r) {
    if (!r->length || r->length > MAX_NAME || spec.task_count == MAX_TASKS)
        return false;
    struct task *tasks = realloc(spec.tasks, (spec.task_count + 1) * sizeof *tasks);
    if (!tasks)
        return false;
    spec.tasks = tasks;
    tasks[spec.task_count++] = (struct task){.name = r->value, .timeout = NEVER};
    return true;
}

static bool add_service(struct record *r) {
    spec.service.name = r->value;
    return r->length && r->length <= MAX_NAME && !spec.task_count;
}

/* Records after the name of a task belong to that task. So do those after the name of the service, which comes before the tasks. */
static bool take_spec_record(struct record *r) {
    if (strcmp(r->key, PROGRAM_KEY_TASK) == 0)
        return add_task(r);
    if (strcmp(r->key, PROGRAM_KEY_SERVICE) == 0)
        return add_service(r);
    if (spec.task_count || spec.service.name)
        return take_key(TASK_KEYS, COUNT_OF(TASK_KEYS), spec.task_count ? &spec.tasks[spec.task_count - 1] : &spec.service, r);
    return take_key(SPEC_KEYS, COUNT_OF(SPEC_KEYS), &spec, r);
}

static bool check_spec(void) {
    const char *missing = NULL;
    if (spec.uid >= 0 && spec.gid < 0)
        missing = "gid"; /* otherwise the child would keep root's group */
    if ((spec.sole_user || spec.private_view) && spec.uid <= 0)
        missing = "a uid of its own";
    if (!spec.mark)
        missing = "mark";
    if (!spec.token)
        missing = "token";
    if (!spec.task_count)
        missing = "task";
    for (size_t i = 0; i < spec.task_count; i++)
        if (!spec.tasks[i].argv.count)
            missing = "arg";
    if (spec.service.name && !spec.service.argv.count)
        missing = "arg";
    if (spec.service.name && !spec.hold)
        missing = "hold"; /* without `hold` no command could start it */
    if (spec.stop_signal < 1 || spec.stop_signal > 31)
        missing = "a stop_signal that exists";
    if (missing)
        snprintf(failure, sizeof failure, "malformed spec: %s is missing", missing);
    return !missing;
}

static bool parse_spec(char *data, size_t length) {
    struct records records = {.at = data, .left = length};
    struct record r;
    char why[120] = "";
    enum parse parsed = take_title(&records, SPEC_TITLE, why, sizeof why);
    while (parsed == RECORD) {
        parsed = take_record(&records, &r);
        if (parsed == RECORD && !take_spec_record(&r)) {
            snprintf(failure, sizeof failure, "malformed spec: %.40s cannot be used", r.key);
            return false;
        }
    }
    if (parsed != END) {
        snprintf(failure, sizeof failure, "malformed spec: %s", *why ? why : parsed == TORN ? "it ends too early" : "not in records");
        return false;
    }
    spec.start_by = to_boottime(spec.start_by, spec.wall_clock);
    spec.stop_after = to_boottime(spec.stop_after, spec.wall_clock);
    return check_spec();
}

bool read_spec(void) {
    struct stat about;
    int fd = openat(folder, "spec", O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0 || fstat(fd, &about) < 0) {
        snprintf(failure, sizeof failure, "cannot read the spec: %s", strerror(errno));
        close_fd(&fd);
        return false;
    }
    if (!S_ISREG(about.st_mode) || about.st_size > MAX_SPEC) {
        snprintf(failure, sizeof failure, "malformed spec: %s", S_ISREG(about.st_mode) ? "larger than 8 MiB" : "not a regular file");
        close(fd);
        return false;
    }
    file = malloc((size_t)about.st_size + 1);
    ssize_t length = file ? read_fd(fd, file, (size_t)about.st_size) : -1;
    if (length < 0)
        snprintf(failure, sizeof failure, "cannot read the spec: %s", strerror(errno));
    close(fd);
    return length >= 0 && parse_spec(file, (size_t)length);
}
