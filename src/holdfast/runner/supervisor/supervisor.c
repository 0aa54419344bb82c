/* holdfast-supervisor FOLDER [--copy]
 *
 * Runs the process of one attempt, so that a worker may die at any instant and another one adopts what runs. It needs no
 * worker to keep the limits of time, to keep the output and to record the end. One per attempt; on the host it leads a
 * session of its own, in a container it is PID 1. docs/supervisor.md is the long form of what follows.
 *
 *   lock       held exclusively (flock) for as long as this program lives; others probe with a shared lock
 *   spec       in:  what to run; records of "key length\nbytes\n" after "holdfast-spec 1\n", closed by "end 0\n\n"
 *   stdin      in:  optional; else the child reads /dev/null
 *   cmd/NAME   in:  commands, the same records after "holdfast-command 1\n"; removed, and acknowledged in the log
 *   started    out: JSON, there before the child's program runs; a folder that has one is never started again
 *   log        out: frames, a header of 32 bytes and then the bytes:
 *                     "HFF1", u8 stream (1 stdout, 2 stderr, 3 events), u8 0, u16 task, u32 length,
 *                     u32 CRC-32 of the other header bytes, u64 offset within the stream, u64 wall clock in µs
 *                   little endian, one write each; the offset counts every byte of the child, also those not kept
 *   space/     in and out: the folder `tree` that the tasks of a held spec work in, and what is to take its place
 *   service    out: what a service says
 *   exit       out: JSON, fsynced, written last and only when no descendant lives
 *
 * With --copy every frame also goes to stdout as a line of base64: an engine's log may not keep bytes that are not UTF-8.
 * Times in files are whole microseconds. Deadlines are CLOCK_BOOTTIME, which counts while the machine sleeps.
 *
 * Rules: a reason that we signalled for before the child ended is the cause; otherwise the child's own end is. Every
 * command carries a token, and one below the highest seen is refused. "No child left" (ECHILD) means no descendant left,
 * since this program is their subreaper. A pid is signalled only while it cannot have been reused: our own unreaped
 * children directly, those further down by pidfd.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* For headers older than the kernel; the numbers are the same on every machine. */
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

#define VERSION 1
#define VERSION_TEXT "1"

/* Exit statuses where no `exit` file was written. With one, the status is the child's: its code, 128 + signal, 124 for a
 * limit of time, 125 for a failed start. */
enum { LEFT_HELD = 120, LEFT_STARTED = 121, LEFT_BROKEN = 122, LEFT_LATE = 123, ENDED_LATE = 124, ENDED_UNSTARTED = 125, LEFT_USAGE = 64 };

enum { OUT = 1, ERR = 2, EVENT = 3 };

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))
#define HEADER 32
#define CHUNK 65536
#define COPY_CHUNK 8192 /* one line of base64 stays below the 16 KiB at which engines cut lines */
#define FULL_PIPE 256   /* chunks that a pipe can hold at most */
#define EVENT_ROOM 7168
#define TEXT_ROOM 512
#define MAX_SPEC (8u << 20)
#define MAX_COMMAND 4096u
#define MAX_TASKS 1000u
#define MAX_NAME 64u
#define MAX_WORD 256u
#define MAX_SECONDS 1000000000ull
#define COMMANDS_PER_PASS 64
#define MAX_TREE 65536u

#define MS 1000ll
#define SECOND 1000000ll
#define NEVER INT64_MAX
#define POLL_COMMANDS (250 * MS) /* without notices */
#define POLL_ANYWAY (1 * SECOND) /* with it: a missed notice, and a machine that slept */
#define TORN_COMMAND (2 * SECOND)
#define NOT_DEAD_AFTER (5 * SECOND)
#define FLUSH_COPY (5 * SECOND)
#define REST (2 * MS)    /* after a short read: a child that writes byte by byte would cost a frame for each */
#define SHORT_READ 4096
#define LOCK_TRIES 10000 /* of a millisecond */
#define HELD_TRIES 200
#define RECORD_FOR (30 * SECOND)

typedef int64_t micros;

enum cause { NONE, EXITED, TIMED_OUT, IDLE_TIMEOUT, CANCELLED, INTERRUPTED, STOP_AFTER, START_FAILED, OUT_OF_MEMORY, SERVICE_ENDED, FAILED };
static const char *const CAUSES[] = {"none",       "exit",         "timed_out",     "idle_timeout",  "cancelled", "interrupted",
                                     "stop_after", "start_failed", "out_of_memory", "service_ended", "failed"};

/* ---- clocks, text, files ---- */

static micros read_clock(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return (micros)t.tv_sec * SECOND + t.tv_nsec / 1000;
}

static micros boottime(void) { return read_clock(CLOCK_BOOTTIME); }
static micros walltime(void) { return read_clock(CLOCK_REALTIME); }

static micros later(micros from, micros by) { return by > NEVER - from ? NEVER : from + by; }
static micros sooner(micros a, micros b) { return a < b ? a : b; }

struct text {
    char *data;
    size_t size, used;
};

__attribute__((format(printf, 2, 3))) static void put(struct text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->data + t->used, t->size - t->used, format, args);
    va_end(args);
    if (n > 0)
        t->used = (size_t)n < t->size - t->used ? t->used + (size_t)n : t->size - 1;
}

/* Bytes that are not UTF-8 pass as they are; whoever reads the JSON replaces them. */
static void put_string(struct text *t, const char *value) {
    put(t, "\"");
    for (const unsigned char *c = (const unsigned char *)value; *c; c++)
        if (*c == '"' || *c == '\\')
            put(t, "\\%c", *c);
        else if (*c < 0x20 || *c == 0x7f)
            put(t, "\\u%04x", *c);
        else
            put(t, "%c", *c);
    put(t, "\"");
}

static void put_field(struct text *t, const char *key, const char *value) {
    put(t, ",\"%s\":", key);
    put_string(t, value);
}

static bool write_all(int fd, const void *data, size_t length) {
    for (const char *at = data; length;) {
        ssize_t n = write(fd, at, length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        at += n;
        length -= (size_t)n;
    }
    return true;
}

/* Read up to `size` bytes of a small file; the answer is its length, or -1. */
static ssize_t read_fd(int fd, char *data, size_t size) {
    size_t used = 0;
    while (used < size) {
        ssize_t n = read(fd, data + used, size - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        used += (size_t)n;
    }
    return (ssize_t)used;
}

static bool read_text(const char *path, char *data, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read_fd(fd, data, size - 1);
    close(fd);
    data[n < 0 ? 0 : n] = 0;
    return n >= 0;
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* ---- state: one program, one attempt ---- */

struct strings {
    char **items;
    size_t count, room;
};

struct task {
    char *name, *cwd;
    struct strings argv, env;
    micros timeout;
    /* What became of it. */
    bool begun, ended;
    enum cause cause;
    int code, signal;
    micros started_at, ended_at;
};

static const struct limit {
    const char *name;
    int resource;
} LIMITS[] = {{"as", RLIMIT_AS},         {"core", RLIMIT_CORE},   {"cpu", RLIMIT_CPU},    {"data", RLIMIT_DATA}, {"fsize", RLIMIT_FSIZE},
              {"nofile", RLIMIT_NOFILE}, {"nproc", RLIMIT_NPROC}, {"stack", RLIMIT_STACK}};
#define LIMIT_COUNT COUNT_OF(LIMITS)

static struct spec {
    uint64_t token, cap;
    char *mark, *cwd;
    struct strings env;
    int64_t uid, gid;
    gid_t groups[64];
    size_t group_count;
    int umask;
    bool no_new_privs, wall_clock, hold;
    bool limited[LIMIT_COUNT];
    rlim_t limits[LIMIT_COUNT];
    micros timeout, idle_timeout, stop_grace, drain, start_by, stop_after;
    struct task *tasks, service;
    size_t task_count;
    int64_t stop_signal; /* what asks the service to end */
} spec = {.stop_signal = SIGTERM, .uid = -1, .gid = -1, .umask = 077, .timeout = NEVER, .idle_timeout = NEVER, .stop_grace = 5 * SECOND, .drain = SECOND,
          .start_by = NEVER, .stop_after = NEVER};

static int folder = -1, lock_fd = -1, signals = -1, watched = -1, reserved = -1;
static size_t exit_room = 8192;

static struct {
    int fd;
    bool copy;
    uint64_t length, offsets[4], lost[4], dropped[4];
    bool capped;
    int error;
} log_ = {.fd = -1};

static struct {
    char *data; /* lines that stdout has not taken yet */
    size_t size, used;
    uint64_t lost;
} copying;

static struct {
    unsigned number; /* of the task, from 0 */
    pid_t main;      /* leader of its session and group; 0 once it was reaped */
    int go, report, out, err;
    bool children_left;
    micros begun, last_output, drain_until, rest_until[3];
} running = {.go = -1, .report = -1, .out = -1, .err = -1};

static struct {
    bool on;            /* nothing of the tasks runs, and a word is awaited */
    bool go, end;       /* the word that came */
    unsigned next;      /* the task that is next; behind the last, the end is */
} held;

static struct {
    pid_t pid;
    bool asked, fell;   /* told to end; ended without being told */
    bool ending;        /* the attempt ends: from now on it is nothing special */
} service;

static struct {
    enum cause reason; /* the first one that was signalled for */
    const char *by;    /* command, signal or limit */
    bool stopping, killing, killed;
    micros kill_at, next, pause, since, tell_at;
} ladder;

static micros attempt_begun, attempt_begun_at, next_look;
static uint64_t highest_token, oom_before;
static char failure[TEXT_ROOM];

/* ---- frames ---- */

static void put_le(unsigned char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        at[i] = (unsigned char)(value >> (8 * i));
}

static uint32_t crc32(uint32_t crc, const unsigned char *data, size_t length) {
    for (crc = ~crc; length--; data++) {
        crc ^= *data;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

static void fill_header(unsigned char *h, int stream, uint64_t offset, size_t length) {
    memcpy(h, "HFF1", 4);
    h[4] = (unsigned char)stream;
    h[5] = 0;
    put_le(h + 6, running.number, 2);
    put_le(h + 8, length, 4);
    put_le(h + 16, offset, 8);
    put_le(h + 24, (uint64_t)walltime(), 8);
    put_le(h + 12, crc32(crc32(0, h, 12), h + 16, 16), 4);
}

static void flush_copy(void) {
    while (copying.used) {
        ssize_t n = write(STDOUT_FILENO, copying.data, copying.used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno != EAGAIN) { /* nobody will ever read it */
            copying.lost += copying.used;
            copying.used = 0;
        }
        if (n <= 0)
            return;
        copying.used -= (size_t)n;
        memmove(copying.data, copying.data + n, copying.used);
    }
}

/* Room for one more full frame and a few events; else the child has to wait, as it would without us. */
static bool copy_has_room(void) { return !log_.copy || copying.used < copying.size / 2; }

static void copy_frame(const unsigned char *data, size_t length) {
    static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t needed = (length + 2) / 3 * 4 + 1;
    flush_copy();
    if (needed > copying.size - copying.used) {
        copying.lost += needed;
        return;
    }
    char *at = copying.data + copying.used;
    for (size_t i = 0; i < length; i += 3) {
        uint32_t three = (uint32_t)data[i] << 16;
        if (i + 1 < length)
            three |= (uint32_t)data[i + 1] << 8;
        if (i + 2 < length)
            three |= data[i + 2];
        *at++ = DIGITS[three >> 18];
        *at++ = DIGITS[three >> 12 & 63];
        *at++ = i + 1 < length ? DIGITS[three >> 6 & 63] : '=';
        *at++ = i + 2 < length ? DIGITS[three & 63] : '=';
    }
    *at++ = '\n';
    copying.used += needed;
    flush_copy();
}

/* Write one frame. `room` has HEADER free bytes before the payload. What the disk does not take is counted as lost. */
static void write_frame(unsigned char *room, int stream, size_t length) {
    size_t whole = HEADER + length;
    fill_header(room, stream, log_.offsets[stream], length);
    log_.offsets[stream] += length;
    ssize_t n;
    do
        n = pwrite(log_.fd, room, whole, (off_t)log_.length);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)whole) {
        log_.length += whole;
    } else {
        log_.error = n < 0 ? errno : ENOSPC;
        log_.lost[stream] += length;
        if (n > 0 && ftruncate(log_.fd, (off_t)log_.length) < 0)
            log_.error = errno;
    }
    if (log_.copy)
        copy_frame(room, whole);
}

/* ---- events ---- */

static unsigned char event_data[HEADER + EVENT_ROOM];
static struct text event_text = {.data = (char *)event_data + HEADER, .size = EVENT_ROOM};

static struct text *event(const char *name) {
    event_text.used = 0;
    put(&event_text, "{\"event\":\"%s\",\"boottime\":%" PRId64, name, boottime());
    return &event_text;
}

static void send_event(void) {
    if (log_.fd < 0)
        return;
    put(&event_text, "}");
    write_frame(event_data, EVENT, event_text.used);
}

/* ---- records: the format of spec and commands ---- */

struct record {
    char *key, *value;
    size_t length;
};

struct records {
    char *at;
    size_t left;
};

enum parse { RECORD, END, TORN, MALFORMED };

static bool parse_number(const char *text, uint64_t most, uint64_t *value) {
    uint64_t n = 0;
    if (!*text)
        return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || n > (UINT64_MAX - 9) / 10)
            return false;
        n = n * 10 + (uint64_t)(*text - '0');
    }
    *value = n;
    return n <= most;
}

static enum parse take_line(struct records *r, size_t longest, char **line) {
    char *end = memchr(r->at, '\n', r->left < longest ? r->left : longest);
    if (!end)
        return r->left < longest ? TORN : MALFORMED;
    *end = 0;
    *line = r->at;
    r->left -= (size_t)(end + 1 - r->at);
    r->at = end + 1;
    return strlen(*line) == (size_t)(end - *line) ? RECORD : MALFORMED;
}

static enum parse take_record(struct records *r, struct record *out) {
    char *line;
    uint64_t length;
    enum parse parsed = take_line(r, 64, &line);
    if (parsed != RECORD)
        return parsed;
    char *space = strchr(line, ' ');
    if (!space || space == line)
        return MALFORMED;
    *space = 0;
    if (!parse_number(space + 1, MAX_SPEC, &length))
        return MALFORMED;
    if (r->left < length + 1)
        return TORN;
    if (r->at[length] != '\n' || memchr(r->at, 0, length))
        return MALFORMED;
    r->at[length] = 0;
    *out = (struct record){.key = line, .value = r->at, .length = length};
    r->at += length + 1;
    r->left -= length + 1;
    if (strcmp(line, "end") == 0)
        return length == 0 && r->left == 0 ? END : MALFORMED;
    return RECORD;
}

/* Check the first line, "<kind> <version>". */
static enum parse take_title(struct records *r, const char *kind, char *why, size_t room) {
    char *line;
    size_t length = strlen(kind);
    enum parse parsed = take_line(r, 40, &line);
    if (parsed == TORN)
        return TORN;
    if (parsed != RECORD || strncmp(line, kind, length) != 0 || line[length] != ' ') {
        snprintf(why, room, "not a %s", kind);
        return MALFORMED;
    }
    if (strcmp(line + length + 1, VERSION_TEXT) != 0) {
        snprintf(why, room, "%s version %.20s, and this supervisor reads version " VERSION_TEXT, kind, line + length + 1);
        return MALFORMED;
    }
    return RECORD;
}

/* ---- spec ---- */

static bool push(struct strings *list, char *item) {
    if (list->count + 1 >= list->room) {
        size_t room = list->room ? list->room * 2 : 8;
        char **items = realloc(list->items, room * sizeof *items);
        if (!items)
            return false;
        list->items = items;
        list->room = room;
    }
    list->items[list->count++] = item;
    list->items[list->count] = NULL;
    return true;
}

/* What a key's value is, and where it goes within its struct. */
enum kind { COUNT, DURATION, DEADLINE, ID, FLAG, CLOCK, WORD, FOLDER, ENTRY, ARGUMENT, UMASK, GROUPS, LIMIT };

struct key {
    const char *name;
    enum kind kind;
    size_t at;
};

static bool set_number(const char *text, uint64_t most, void *into) {
    uint64_t value;
    if (!parse_number(text, most, &value))
        return false;
    memcpy(into, &value, sizeof value);
    return true;
}

static bool set_flag(bool value, bool known, bool *into) {
    *into = value;
    return known;
}

static bool set_umask(const char *text) {
    char *end;
    long n = strtol(text, &end, 8);
    spec.umask = (int)n;
    return *text >= '0' && *text <= '7' && !*end && n >= 0 && n <= 0777;
}

static bool set_groups(char *text) {
    for (char *save = NULL, *one = strtok_r(text, " ", &save); one; one = strtok_r(NULL, " ", &save)) {
        uint64_t id;
        if (spec.group_count == COUNT_OF(spec.groups) || !parse_number(one, UINT32_MAX - 1, &id))
            return false;
        spec.groups[spec.group_count++] = (gid_t)id;
    }
    return true;
}

static bool set_limit(char *text) {
    char *space = strchr(text, ' ');
    uint64_t value;
    if (!space || !parse_number(space + 1, INT64_MAX, &value))
        return false;
    *space = 0;
    for (size_t i = 0; i < LIMIT_COUNT; i++)
        if (strcmp(text, LIMITS[i].name) == 0) {
            spec.limited[i] = true;
            spec.limits[i] = (rlim_t)value;
            return true;
        }
    return false;
}

static bool set_value(enum kind kind, char *value, void *into) {
    switch (kind) {
    case COUNT:
        return set_number(value, INT64_MAX, into) && strspn(value, "0") != strlen(value);
    case DURATION:
        return set_number(value, MAX_SECONDS * SECOND, into);
    case DEADLINE: /* counts from the boot, or from 1970 */
        return set_number(value, INT64_MAX / 2, into);
    case ID:
        return set_number(value, UINT32_MAX - 1, into);
    case FLAG:
        return set_flag(*value == '1', strcmp(value, "0") == 0 || strcmp(value, "1") == 0, into);
    case CLOCK:
        return set_flag(*value == 'r', strcmp(value, "boottime") == 0 || strcmp(value, "realtime") == 0, into);
    case WORD:
        *(char **)into = value;
        return *value && strlen(value) <= MAX_WORD;
    case FOLDER:
        *(char **)into = value;
        return *value == '/';
    case ENTRY:
        return *value != '=' && strchr(value, '=') && push(into, value);
    case ARGUMENT:
        return push(into, value);
    case UMASK:
        return set_umask(value);
    case GROUPS:
        return set_groups(value);
    case LIMIT:
        return set_limit(value);
    }
    return false;
}

static bool take_key(const struct key *keys, size_t count, void *base, struct record *r) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(keys[i].name, r->key) == 0)
            return set_value(keys[i].kind, r->value, (char *)base + keys[i].at);
    return false;
}

static const struct key SPEC_KEYS[] = {
    {"token", COUNT, offsetof(struct spec, token)},
    {"mark", WORD, offsetof(struct spec, mark)},
    {"env", ENTRY, offsetof(struct spec, env)},
    {"cwd", FOLDER, offsetof(struct spec, cwd)},
    {"uid", ID, offsetof(struct spec, uid)},
    {"gid", ID, offsetof(struct spec, gid)},
    {"groups", GROUPS, 0},
    {"umask", UMASK, 0},
    {"no_new_privs", FLAG, offsetof(struct spec, no_new_privs)},
    {"limit", LIMIT, 0},
    {"output_cap", COUNT, offsetof(struct spec, cap)},
    {"timeout", DURATION, offsetof(struct spec, timeout)},
    {"idle_timeout", DURATION, offsetof(struct spec, idle_timeout)},
    {"stop_grace", DURATION, offsetof(struct spec, stop_grace)},
    {"drain", DURATION, offsetof(struct spec, drain)},
    {"clock", CLOCK, offsetof(struct spec, wall_clock)},
    {"hold", FLAG, offsetof(struct spec, hold)},
    {"stop_signal", ID, offsetof(struct spec, stop_signal)},
    {"start_by", DEADLINE, offsetof(struct spec, start_by)},
    {"stop_after", DEADLINE, offsetof(struct spec, stop_after)},
};

static const struct key TASK_KEYS[] = {
    {"arg", ARGUMENT, offsetof(struct task, argv)},
    {"env", ENTRY, offsetof(struct task, env)},
    {"cwd", FOLDER, offsetof(struct task, cwd)},
    {"timeout", DURATION, offsetof(struct task, timeout)},
};

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

/* What stands after a task's name belongs to it, and the same with the service, which stands before the tasks. */
static bool take_spec_record(struct record *r) {
    if (strcmp(r->key, "task") == 0)
        return add_task(r);
    if (strcmp(r->key, "service") == 0)
        return add_service(r);
    if (spec.task_count || spec.service.name)
        return take_key(TASK_KEYS, COUNT_OF(TASK_KEYS), spec.task_count ? &spec.tasks[spec.task_count - 1] : &spec.service, r);
    return take_key(SPEC_KEYS, COUNT_OF(SPEC_KEYS), &spec, r);
}

/* Say once, in our own clock, what another clock's deadline is; later jumps of that clock change nothing. */
static micros in_boottime(micros deadline, bool wall) {
    if (!wall || deadline == NEVER)
        return deadline;
    return boottime() + (deadline - walltime());
}

static bool check_spec(void) {
    const char *missing = NULL;
    if (spec.uid >= 0 && spec.gid < 0)
        missing = "gid"; /* a user with root's group has not given up much */
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
        missing = "hold"; /* nobody else starts it */
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
    enum parse parsed = take_title(&records, "holdfast-spec", why, sizeof why);
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
    spec.start_by = in_boottime(spec.start_by, spec.wall_clock);
    spec.stop_after = in_boottime(spec.stop_after, spec.wall_clock);
    return check_spec();
}

/* The bytes stay in memory: the spec's strings point into them. */
static bool read_spec(void) {
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
    char *data = malloc((size_t)about.st_size + 1);
    ssize_t length = data ? read_fd(fd, data, (size_t)about.st_size) : -1;
    if (length < 0)
        snprintf(failure, sizeof failure, "cannot read the spec: %s", strerror(errno));
    close(fd);
    return length >= 0 && parse_spec(data, (size_t)length);
}

/* ---- what the system knows ---- */

struct stat_line {
    pid_t parent, group, session;
    uint64_t start_ticks;
};

static bool read_stat(pid_t pid, struct stat_line *out) {
    char path[40], line[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (!read_text(path, line, sizeof line))
        return false;
    char *after = strrchr(line, ')'); /* the name may hold anything */
    return after && sscanf(after + 1, " %*c %d %d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %" SCNu64, &out->parent,
                           &out->group, &out->session, &out->start_ticks) == 4;
}

static uint64_t counter_in(const char *path) {
    char data[1024];
    if (!read_text(path, data, sizeof data))
        return UINT64_MAX;
    char *at = strstr(data, "oom_kill ");
    return at ? strtoull(at + 9, NULL, 10) : UINT64_MAX;
}

/* How often the memory limit of our control group has killed, in either version; a container may see its group as root. */
static uint64_t oom_kills(void) {
    char groups[4096], path[4096 + 64];
    if (!read_text("/proc/self/cgroup", groups, sizeof groups))
        return 0;
    for (char *save = NULL, *line = strtok_r(groups, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *first = strchr(line, ':'), *second = first ? strchr(first + 1, ':') : NULL;
        if (!second)
            continue;
        *second = 0;
        bool unified = strcmp(first + 1, "") == 0;
        if (!unified && strcmp(first + 1, "memory") != 0)
            continue;
        const char *root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory", *file = unified ? "memory.events" : "memory.oom_control";
        snprintf(path, sizeof path, "%s%s/%s", root, second + 1, file);
        uint64_t count = counter_in(path);
        if (count == UINT64_MAX) {
            snprintf(path, sizeof path, "%s/%s", root, file);
            count = counter_in(path);
        }
        if (count != UINT64_MAX)
            return count;
    }
    return 0;
}

static void read_boot_id(char *id, size_t size) {
    if (!read_text("/proc/sys/kernel/random/boot_id", id, size))
        *id = 0;
    id[strcspn(id, "\n")] = 0;
}

/* ---- descendants ---- */

struct member {
    pid_t pid, parent;
};

static struct {
    struct member *items;
    size_t count, room;
    pid_t spare; /* not looked at, nor what descends from it */
} tree;

static void add_member(pid_t pid, pid_t parent) {
    if (tree.spare && pid == tree.spare)
        return;
    if (tree.count == tree.room && tree.count < MAX_TREE) {
        size_t room = tree.room ? tree.room * 2 : 64;
        struct member *items = realloc(tree.items, room * sizeof *items);
        if (!items)
            return;
        tree.items = items;
        tree.room = room;
    }
    if (tree.count < tree.room)
        tree.items[tree.count++] = (struct member){.pid = pid, .parent = parent};
}

static bool add_children_of_thread(pid_t parent, const char *thread) {
    char path[80], data[1024];
    snprintf(path, sizeof path, "/proc/%d/task/%.20s/children", parent, thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    pid_t pid = 0;
    for (ssize_t n; (n = read_fd(fd, data, sizeof data)) > 0;)
        for (ssize_t i = 0; i < n; i++)
            if (data[i] >= '0' && data[i] <= '9') {
                pid = pid * 10 + (data[i] - '0');
            } else if (pid) {
                add_member(pid, parent);
                pid = 0;
            }
    close(fd);
    return true;
}

static void add_children(pid_t parent) {
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/task", parent);
    DIR *threads = opendir(path);
    if (!threads)
        return;
    for (struct dirent *entry; (entry = readdir(threads));)
        if (entry->d_name[0] != '.')
            add_children_of_thread(parent, entry->d_name);
    closedir(threads);
}

/* For kernels without `children` files: only those whose parent we are, which is all of them in the end. */
static void add_own_children_by_scan(void) {
    DIR *proc = opendir("/proc");
    struct stat_line line;
    uint64_t pid;
    if (!proc)
        return;
    for (struct dirent *entry; (entry = readdir(proc));)
        if (parse_number(entry->d_name, INT_MAX, &pid) && read_stat((pid_t)pid, &line) && line.parent == getpid())
            add_member((pid_t)pid, getpid());
    closedir(proc);
}

static void collect_children(void) {
    char self[20];
    snprintf(self, sizeof self, "%d", getpid());
    tree.count = 0;
    tree.spare = service.ending ? 0 : service.pid;
    if (!add_children_of_thread(getpid(), self))
        add_own_children_by_scan();
}

/* Whether anything lives beside the service. The list may miss one while another ends, so an empty one is asked for twice. */
static bool others_left(void) {
    collect_children();
    if (!tree.count)
        collect_children();
    return tree.count > 0;
}

static void collect_tree(void) {
    collect_children();
    for (size_t i = 0; i < tree.count; i++)
        add_children(tree.items[i].pid);
}

/* A child of ours cannot be reused before we reap it. Others are held by a pidfd while we look whether they are still what
 * we saw; one that moved up in between is met in the next round. */
static void signal_member(const struct member *m, int sig) {
    struct stat_line line;
    if (m->parent == getpid()) {
        kill(m->pid, sig);
        return;
    }
    int fd = (int)syscall(SYS_pidfd_open, m->pid, 0);
    if (fd < 0)
        return;
    if (read_stat(m->pid, &line) && line.parent == m->parent)
        syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0);
    close(fd);
}

static void signal_tree(int sig, pid_t except_group) {
    struct stat_line line;
    collect_tree();
    for (size_t i = 0; i < tree.count; i++)
        if (!except_group || (read_stat(tree.items[i].pid, &line) && line.group != except_group))
            signal_member(&tree.items[i], sig);
}

/* A group is signalled only while its leader is unreaped: after that its number may be anybody's. */
static void signal_group(int sig) {
    if (running.main && kill(-running.main, sig) < 0 && errno == ESRCH)
        kill(running.main, sig); /* it has not made its group yet */
}

/* ---- the ladder: ask, wait, kill everything, until nothing is left ---- */

static void start_killing(void) {
    micros now = boottime();
    if (ladder.killing)
        return;
    ladder.killing = true;
    ladder.since = ladder.next = now;
    ladder.pause = 2 * MS;
    ladder.tell_at = later(now, NOT_DEAD_AFTER);
    if (!running.children_left)
        return;
    ladder.killed = true;
    put_field(event("killed"), "reason", ladder.reason ? CAUSES[ladder.reason] : "leftovers");
    send_event();
}

static void tell_not_dead(micros now) {
    struct text *t = event("not_dead");
    put(t, ",\"for\":%" PRId64 ",\"pids\":[", now - ladder.since);
    for (size_t i = 0; i < tree.count && i < 100; i++)
        put(t, "%s%d", i ? "," : "", tree.items[i].pid);
    put(t, "]");
    send_event();
    ladder.tell_at = now + 2 * (now - ladder.since);
}

static void kill_round(void) {
    micros now = boottime();
    service.ending |= ladder.reason != NONE;
    signal_group(SIGKILL);
    signal_tree(SIGKILL, 0);
    ladder.next = now + ladder.pause;
    ladder.pause = sooner(ladder.pause * 2, 5 * SECOND);
    if (now >= ladder.tell_at)
        tell_not_dead(now);
}

static bool reap(void);

static bool unfinished(void) {
    const struct task *task = &spec.tasks[running.number];
    bool more = spec.hold || running.number + 1 < spec.task_count;
    return !held.end && (running.main || held.on || (more && task->cause == EXITED && task->code == 0));
}

static void ask_service_to_end(void) {
    if (service.pid && !service.asked)
        kill(service.pid, (int)spec.stop_signal);
    service.asked = true;
}

/* Stop for a reason. The first one stays; a later one can only bring the kill forward. */
static void stop(enum cause reason, const char *by, micros grace) {
    micros now = boottime();
    reap(); /* if the exit came first, the exit decides */
    if (!ladder.reason && unfinished()) {
        ladder.reason = reason;
        ladder.by = by;
    }
    micros kill_at = later(now, grace);
    ladder.kill_at = ladder.stopping ? sooner(ladder.kill_at, kill_at) : kill_at;
    if (ladder.stopping || ladder.killing)
        return;
    ladder.stopping = true;
    if (!grace)
        return;
    struct text *t = event("signalled");
    put_field(t, "reason", CAUSES[ladder.reason ? ladder.reason : reason]);
    put_field(t, "by", by);
    put(t, ",\"grace\":%" PRId64, grace);
    send_event();
    ask_service_to_end();
    /* Those outside of the group first: once the group ends, they change their parent while we look for them. */
    signal_tree(SIGTERM, running.main);
    signal_group(SIGTERM);
    signal_group(SIGCONT);
}

static void climb(void) {
    micros now = boottime();
    if (ladder.stopping && now >= ladder.kill_at)
        start_killing();
    bool silent = running.out < 0 && running.err < 0;
    if (!running.main && !ladder.stopping && (silent || now >= running.drain_until))
        start_killing();
    if (ladder.killing && running.children_left && now >= ladder.next)
        kill_round();
}

/* Limits hold for the child; what it leaves behind is not waited for anyway. */
static micros limit_of(enum cause *reason) {
    struct task *task = &spec.tasks[running.number];
    static const enum cause reasons[] = {TIMED_OUT, TIMED_OUT, IDLE_TIMEOUT, STOP_AFTER};
    micros limits[] = {later(attempt_begun, spec.timeout), held.on ? NEVER : later(running.begun, task->timeout),
                       held.on ? NEVER : later(running.last_output, spec.idle_timeout), spec.stop_after};
    size_t first = 0;
    for (size_t i = 1; i < COUNT_OF(limits); i++)
        if (limits[i] < limits[first])
            first = i;
    *reason = reasons[first];
    return limits[first];
}

static void check_limits(void) {
    enum cause reason;
    if (service.fell && !ladder.stopping)
        stop(SERVICE_ENDED, "service", spec.stop_grace);
    if ((running.main || held.on) && !ladder.stopping && boottime() >= limit_of(&reason))
        stop(reason, "limit", spec.stop_grace);
}

/* ---- the child, between fork and exec ---- */

enum step { STEP_DESCRIPTORS, STEP_LIMITS, STEP_GROUPS, STEP_GID, STEP_UID, STEP_PRIVILEGES, STEP_CWD, STEP_EXEC };
static const char *const STEPS[] = {"set up its descriptors", "set its limits", "set its groups", "set its group", "set its user",
                                    "give up privileges",     "enter its folder", "run it"};

struct report {
    int step, error;
};

static _Noreturn void give_up(int report, enum step step, int error) {
    struct report r = {.step = (int)step, .error = error};
    (void)!write(report, &r, sizeof r);
    _exit(ENDED_UNSTARTED);
}

/* By the system call: the C library does not let its own two signals be touched, and passes them on ignored. */
static void default_signals(void) {
    static const unsigned char defaults[64];
    for (int i = 1; i <= 64; i++)
        syscall(SYS_rt_sigaction, i, defaults, NULL, 8);
}

static void drop_privileges(int report) {
    uid_t r, e, s;
    gid_t rg, eg, sg;
    if ((spec.uid >= 0 || spec.gid >= 0) && geteuid() == 0 && setgroups(spec.group_count, spec.groups) < 0)
        give_up(report, STEP_GROUPS, errno);
    if (spec.gid >= 0) {
        gid_t gid = (gid_t)spec.gid;
        if (setresgid(gid, gid, gid) < 0 || getresgid(&rg, &eg, &sg) < 0)
            give_up(report, STEP_GID, errno);
        if (rg != gid || eg != gid || sg != gid)
            give_up(report, STEP_GID, EPERM);
    }
    if (spec.uid >= 0) {
        uid_t uid = (uid_t)spec.uid;
        if (setresuid(uid, uid, uid) < 0 || getresuid(&r, &e, &s) < 0)
            give_up(report, STEP_UID, errno);
        if (r != uid || e != uid || s != uid || (uid && setuid(0) == 0))
            give_up(report, STEP_UID, EPERM);
    }
    if (spec.no_new_privs && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        give_up(report, STEP_PRIVILEGES, errno);
}

static void set_limits(int report) {
    for (size_t i = 0; i < LIMIT_COUNT; i++) {
        struct rlimit limit = {.rlim_cur = spec.limits[i], .rlim_max = spec.limits[i]};
        if (spec.limited[i] && setrlimit((__typeof__(RLIMIT_AS))LIMITS[i].resource, &limit) < 0)
            give_up(report, STEP_LIMITS, errno);
    }
}

static bool same_key(const char *a, const char *b) {
    size_t length = (size_t)(strchr(a, '=') - a) + 1;
    return strncmp(a, b, length) == 0;
}

static bool overridden(const char *entry, const struct strings *by) {
    for (size_t i = 0; i < by->count; i++)
        if (same_key(entry, by->items[i]))
            return true;
    return same_key(entry, "HOLDFAST_MARK=");
}

/* From nothing: the spec's entries, the task's instead of those of the same name, and the mark. */
static char **build_environment(const struct task *task) {
    static const struct strings none;
    char *mark = malloc(strlen(spec.mark) + sizeof "HOLDFAST_MARK=");
    struct strings env = {0};
    bool whole = mark != NULL;
    for (size_t i = 0; whole && i < spec.env.count; i++)
        whole = overridden(spec.env.items[i], &task->env) || push(&env, spec.env.items[i]);
    for (size_t i = 0; whole && i < task->env.count; i++)
        whole = overridden(task->env.items[i], &none) || push(&env, task->env.items[i]);
    if (!whole)
        return NULL;
    sprintf(mark, "HOLDFAST_MARK=%s", spec.mark);
    return push(&env, mark) ? env.items : NULL;
}

static const char *search_path(char **env) {
    for (; *env; env++)
        if (strncmp(*env, "PATH=", 5) == 0)
            return *env + 5;
    return "/usr/local/bin:/usr/bin:/bin";
}

/* execvpe, but never a shell for a file without a format, and the same with every C library. Returns the errno. */
static int execute(char **argv, char **env) {
    char path[PATH_MAX];
    int error = ENOENT;
    if (strchr(argv[0], '/') || !*argv[0]) {
        execve(argv[0], argv, env);
        return errno;
    }
    for (const char *at = search_path(env); at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
        int length = (int)strcspn(at, ":");
        if (!length || snprintf(path, sizeof path, "%.*s/%s", length, at, argv[0]) >= (int)sizeof path)
            continue;
        execve(path, argv, env);
        if (errno == EACCES)
            error = EACCES;
        else if (errno != ENOENT && errno != ENOTDIR)
            return errno;
    }
    return error;
}

static void die_with_parent(pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(ENDED_UNSTARTED);
}

static void await_word(int go) {
    char word;
    close(running.go); /* the parent's end: with it open here, its death would not be seen */
    if (read(go, &word, 1) != 1)
        _exit(ENDED_UNSTARTED);
}

/* `go` is where a task waits for the word to begin; a service has none. */
static _Noreturn void become_child(const struct task *task, pid_t parent, int go, int report, int in, int out, int err) {
    setsid();
    die_with_parent(parent);
    close(lock_fd);
    if (go >= 0)
        await_word(go);
    if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
        give_up(report, STEP_DESCRIPTORS, errno);
    set_limits(report);
    drop_privileges(report);
    die_with_parent(parent); /* a change of user has cleared it */
    umask((mode_t)spec.umask);
    const char *cwd = task->cwd ? task->cwd : spec.cwd ? spec.cwd : "/";
    if (chdir(cwd) < 0)
        give_up(report, STEP_CWD, errno);
    char **env = build_environment(task);
    if (!env)
        give_up(report, STEP_EXEC, ENOMEM);
    sigset_t none;
    sigemptyset(&none);
    default_signals();
    sigprocmask(SIG_SETMASK, &none, NULL);
    give_up(report, STEP_EXEC, execute(task->argv.items, env));
}

/* ---- a task ---- */

static int open_stdin(void) {
    int fd = openat(folder, "stdin", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    return fd >= 0 ? fd : open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void close_task(void) {
    close_fd(&running.go);
    close_fd(&running.report);
    close_fd(&running.out);
    close_fd(&running.err);
}

/* Fork the child, which waits for a word before it does anything of its own. */
static bool fork_child(struct task *task) {
    int go[2] = {-1, -1}, report[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, in = open_stdin();
    pid_t parent = getpid(), pid = -1;
    if (in >= 0 && !pipe2(go, O_CLOEXEC) && !pipe2(report, O_CLOEXEC) && !pipe2(out, O_CLOEXEC) && !pipe2(err, O_CLOEXEC)) {
        running.go = go[1];
        pid = fork();
        if (pid == 0)
            become_child(task, parent, go[0], report[1], in, out[1], err[1]);
    }
    int error = errno;
    running.report = report[0];
    running.go = go[1];
    running.out = out[0];
    running.err = err[0];
    close_fd(&in);
    close_fd(&go[0]);
    close_fd(&report[1]);
    close_fd(&out[1]);
    close_fd(&err[1]);
    if (pid < 0) {
        snprintf(failure, sizeof failure, "cannot start a process: %s", strerror(error));
        close_task();
        return false;
    }
    fcntl(running.report, F_SETFL, O_NONBLOCK);
    fcntl(running.out, F_SETFL, O_NONBLOCK);
    fcntl(running.err, F_SETFL, O_NONBLOCK);
    running.main = pid;
    running.children_left = true;
    return true;
}

/* The child is not to run after all: without the word it leaves. */
static void dismiss_child(void) {
    close_task();
    if (running.main) {
        kill(running.main, SIGKILL);
        waitpid(running.main, NULL, 0);
    }
    running.main = 0;
    running.children_left = false;
}

static int open_service_log(void) {
    return openat(folder, "service", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
}

/* Start the service and wait until its program runs, or could not. */
static const char *start_service(void) {
    if (service.pid)
        return service.asked ? "it is about to end" : NULL;
    int report[2] = {-1, -1}, out = open_service_log(), in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pid_t parent = getpid(), pid = -1;
    struct report r = {.step = -1};
    if (in >= 0 && out >= 0 && !pipe2(report, O_CLOEXEC) && (pid = fork()) == 0)
        become_child(&spec.service, parent, -1, report[1], in, out, out);
    int error = errno;
    close_fd(&in);
    close_fd(&out);
    close_fd(&report[1]);
    service.asked = service.fell = false;
    service.pid = pid > 0 ? pid : 0;
    if (pid > 0 && read_fd(report[0], (char *)&r, sizeof r) == sizeof r && r.step >= 0 && r.step <= STEP_EXEC)
        snprintf(failure, sizeof failure, "cannot start %.200s: could not %s: %s", spec.service.argv.items[0], STEPS[r.step], strerror(r.error));
    close_fd(&report[0]);
    if (pid < 0) {
        snprintf(failure, sizeof failure, "cannot start a process: %s", strerror(error));
        service.fell = true;
        return failure;
    }
    running.children_left = true;
    if (*failure)
        return failure;
    struct text *t = event("service_started");
    put_field(t, "name", spec.service.name);
    put(t, ",\"pid\":%d", pid);
    send_event();
    return NULL;
}

static bool record_started(void) {
    char data[2048], boot[64];
    struct text t = {.data = data, .size = sizeof data};
    struct stat_line self = {0}, child = {0};
    read_stat(getpid(), &self);
    read_stat(running.main, &child);
    read_boot_id(boot, sizeof boot);
    put(&t, "{\"version\":%d,\"token\":%" PRIu64, VERSION, spec.token);
    put_field(&t, "mark", spec.mark);
    put_field(&t, "boot_id", boot);
    put(&t, ",\"supervisor_pid\":%d,\"supervisor_start_ticks\":%" PRIu64, getpid(), self.start_ticks);
    put(&t, ",\"child_pid\":%d,\"child_start_ticks\":%" PRIu64, running.main, child.start_ticks);
    put(&t, ",\"supervisor_session\":%d,\"child_session\":%d", getsid(0), running.main);
    put(&t, ",\"started_at\":%" PRId64 ",\"boottime\":%" PRId64 "}\n", attempt_begun_at, attempt_begun);
    int fd = openat(folder, "started.tmp", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    bool written = fd >= 0 && write_all(fd, t.data, t.used) && renameat(folder, "started.tmp", folder, "started") == 0;
    if (!written) {
        snprintf(failure, sizeof failure, "cannot write `started`: %s", strerror(errno));
        unlinkat(folder, "started.tmp", 0);
    }
    close_fd(&fd);
    return written;
}

static void release_child(struct task *task) {
    running.begun = running.last_output = boottime();
    task->begun = true;
    task->started_at = walltime();
    struct stat_line line = {0};
    read_stat(running.main, &line);
    struct text *t = event("task_started");
    put_field(t, "name", task->name);
    put(t, ",\"pid\":%d,\"start_ticks\":%" PRIu64, running.main, line.start_ticks);
    send_event();
    write_all(running.go, "g", 1);
    close_fd(&running.go);
}

/* exec has either closed the pipe, or its failure is in it. */
static void read_report(void) {
    struct report r;
    struct task *task = &spec.tasks[running.number];
    if (running.report < 0)
        return;
    ssize_t n = read(running.report, &r, sizeof r);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n == sizeof r && r.step >= 0 && r.step <= STEP_EXEC) {
        task->cause = START_FAILED;
        snprintf(failure, sizeof failure, "cannot start %.200s: could not %s: %s", task->argv.items[0], STEPS[r.step], strerror(r.error));
    }
    close_fd(&running.report);
}

static void main_ended(int status) {
    struct task *task = &spec.tasks[running.number];
    read_report();
    running.main = 0;
    running.drain_until = later(boottime(), spec.drain);
    task->ended = true;
    task->ended_at = walltime();
    task->code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    task->signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    if (task->cause == START_FAILED)
        task->code = -1;
    else if (ladder.reason)
        task->cause = ladder.reason;
    else if ((task->signal == SIGKILL || task->code == 128 + SIGKILL) && oom_kills() > oom_before)
        task->cause = OUT_OF_MEMORY;
    else
        task->cause = EXITED;
}

/* One that was not told to end takes the attempt with it. */
static void service_ended(int status) {
    struct text *t = event("service_ended");
    put(t, WIFEXITED(status) ? ",\"code\":%d" : ",\"signal\":%d", WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    put(t, ",\"asked\":%s", service.asked ? "true" : "false");
    send_event();
    service.pid = 0;
    service.fell = !service.asked;
    if (service.fell && !*failure)
        snprintf(failure, sizeof failure, "%.64s ended by itself, %s %d", spec.service.name, WIFEXITED(status) ? "exit code" : "signal",
                 WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}

/* Reap everything that has ended; say whether something had. */
static bool reap(void) {
    bool any = false;
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG | __WALL);
        if (pid < 0 && errno == EINTR)
            continue;
        if (pid <= 0) {
            running.children_left = pid == 0 && (!service.pid || service.ending || others_left());
            break;
        }
        any = true;
        if (pid == running.main)
            main_ended(status);
        if (pid == service.pid)
            service_ended(status);
    }
    if (any && ladder.killing)
        ladder.next = boottime(); /* what it left behind is ours now */
    return any;
}

static void keep_output(unsigned char *room, int stream, size_t length) {
    uint64_t kept = log_.offsets[OUT] + log_.offsets[ERR] - log_.dropped[OUT] - log_.dropped[ERR];
    uint64_t left = spec.cap ? (kept < spec.cap ? spec.cap - kept : 0) : UINT64_MAX;
    size_t keep = length < left ? length : (size_t)left;
    if (keep)
        write_frame(room, stream, keep);
    if (keep == length)
        return;
    log_.offsets[stream] += length - keep;
    log_.dropped[stream] += length - keep;
    if (!log_.capped) {
        log_.capped = true;
        put(event("output_capped"), ",\"cap\":%" PRIu64, spec.cap);
        send_event();
    }
}

/* Read one chunk; the answer is whether there may be more. */
static bool read_output(int *fd, int stream) {
    static unsigned char room[HEADER + CHUNK];
    if (*fd < 0)
        return false;
    ssize_t n = read(*fd, room + HEADER, log_.copy ? COPY_CHUNK : CHUNK);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return errno == EINTR;
    if (n <= 0) {
        close_fd(fd);
        return false;
    }
    running.last_output = boottime();
    running.rest_until[stream] = n < SHORT_READ ? running.last_output + REST : 0;
    keep_output(room, stream, (size_t)n);
    return true;
}

static bool rested(int stream) { return boottime() >= running.rest_until[stream]; }

static void read_outputs(void) {
    if (!copy_has_room()) {
        running.last_output = boottime(); /* it cannot write because we do not read: not idle */
        return;
    }
    if (rested(OUT))
        read_output(&running.out, OUT);
    if (rested(ERR))
        read_output(&running.err, ERR);
}

/* No descendant lives, so what is in the pipes is all there will be; somebody outside may hold them open for ever. */
static bool task_over(void) {
    if (running.main || running.children_left)
        return false;
    for (int i = 0; i < FULL_PIPE && copy_has_room() && read_output(&running.out, OUT); i++)
        ;
    for (int i = 0; i < FULL_PIPE && copy_has_room() && read_output(&running.err, ERR); i++)
        ;
    return copy_has_room() || boottime() >= later(running.drain_until, FLUSH_COPY);
}

/* ---- commands ---- */

struct command {
    char *verb, *kind, *name, *text;
    uint64_t token;
    int64_t task;
    micros grace, stop_after;
    bool wall_clock;
};

static const struct key COMMAND_KEYS[] = {
    {"verb", WORD, offsetof(struct command, verb)},
    {"kind", WORD, offsetof(struct command, kind)},
    {"token", COUNT, offsetof(struct command, token)},
    {"grace", DURATION, offsetof(struct command, grace)},
    {"stop_after", DEADLINE, offsetof(struct command, stop_after)},
    {"clock", CLOCK, offsetof(struct command, wall_clock)},
    {"task", ID, offsetof(struct command, task)},
    {"name", WORD, offsetof(struct command, name)},
    {"text", WORD, offsetof(struct command, text)},
};

static enum parse parse_command(char *data, size_t length, struct command *c, char *why, size_t room) {
    struct records records = {.at = data, .left = length};
    struct record r;
    enum parse parsed = take_title(&records, "holdfast-command", why, room);
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

/* Begin with a task, and leave out those before it. A word that was said before changes nothing. */
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
    if (c->text && !ladder.reason) {
        snprintf(failure, sizeof failure, "%s", c->text);
        ladder.reason = FAILED;
        ladder.by = "command";
    }
    return NULL;
}

static bool plain_name(const char *name) {
    return *name && *name != '.' && !strchr(name, '/');
}

/* Put a folder of `space` in the place of the tree, which is kept as `was.NAME`: not by its name, or a word that is said again would
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

static const char *start_service(void);

static const char *command_service(const struct command *c) {
    bool stops = c->kind && strcmp(c->kind, "stop") == 0;
    if (!stops && (!c->kind || strcmp(c->kind, "start") != 0))
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

static const char *stop_for(const struct command *c, micros grace) {
    bool interrupts = c->kind && strcmp(c->kind, "interrupt") == 0;
    if (c->kind && !interrupts && strcmp(c->kind, "cancel") != 0)
        return "unknown kind";
    stop(interrupts ? INTERRUPTED : CANCELLED, "command", grace);
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
} VERBS[] = {{"hold", hold_on}, {"beat", beat},    {"stop", stop_gently}, {"kill", stop_at_once},
             {"go", go_on},     {"end", end_here}, {"place", place},      {"service", command_service}};

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
    put_field(t, "reason", ladder.reason ? CAUSES[ladder.reason] : "");
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

static void look_for_commands(bool noticed) {
    micros now = boottime();
    if (!noticed && now < next_look)
        return;
    take_commands();
    next_look = now + (watched >= 0 ? POLL_ANYWAY : POLL_COMMANDS);
}

/* Directory notification by SIGIO. inotify would do, but a user may have only 128 of it, and every attempt would take one
 * from everything else that runs as this user. */
static void watch_commands(void) {
    mkdirat(folder, "cmd", 0700);
    watched = openat(folder, "cmd", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (watched >= 0 && fcntl(watched, F_NOTIFY, DN_CREATE | DN_RENAME | DN_MODIFY | DN_ATTRIB | DN_MULTISHOT) < 0)
        close_fd(&watched);
}

/* ---- the loop ---- */

static micros next_deadline(void) {
    enum cause ignored;
    micros at = next_look;
    if ((running.main || held.on) && !ladder.stopping)
        at = sooner(at, limit_of(&ignored));
    if (ladder.stopping && !ladder.killing)
        at = sooner(at, ladder.kill_at);
    if (!running.main && !held.on && !ladder.stopping && !ladder.killing)
        at = sooner(at, running.drain_until);
    if (ladder.killing && running.children_left)
        at = sooner(at, ladder.next);
    for (int stream = OUT; stream <= ERR; stream++)
        if (!rested(stream))
            at = sooner(at, running.rest_until[stream]);
    return at;
}

/* The answer is whether the folder of commands has changed. */
static bool read_signals(void) {
    struct signalfd_siginfo info;
    bool noticed = false;
    while (read(signals, &info, sizeof info) == sizeof info) {
        if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT)
            stop(INTERRUPTED, "signal", spec.stop_grace);
        noticed |= info.ssi_signo == SIGIO;
    }
    return noticed;
}

/* Sleep until something happens or is due; the answer is whether a command may have come. */
static bool wait_for_news(void) {
    bool reading = copy_has_room();
    struct pollfd polled[] = {{.fd = signals, .events = POLLIN},
                              {.fd = running.report, .events = POLLIN},
                              {.fd = reading && rested(OUT) ? running.out : -1, .events = POLLIN},
                              {.fd = reading && rested(ERR) ? running.err : -1, .events = POLLIN},
                              {.fd = copying.used ? STDOUT_FILENO : -1, .events = POLLOUT}};
    micros now = boottime(), due = next_deadline();
    micros wait = due <= now ? 0 : sooner((due - now + 999) / 1000, 1000);
    poll(polled, COUNT_OF(polled), (int)wait);
    if (polled[4].revents)
        flush_copy();
    reap(); /* before the signals and commands: if the exit came first, the exit decides */
    return polled[0].revents && read_signals();
}

static void tell_task_ended(const struct task *task) {
    struct text *t = event("task_ended");
    put_field(t, "name", task->name);
    put_field(t, "cause", CAUSES[task->cause]);
    if (task->code >= 0)
        put(t, ",\"code\":%d", task->code);
    if (task->signal)
        put(t, ",\"signal\":%d", task->signal);
    send_event();
}

static void see_task_through(struct task *task) {
    while (!task_over()) {
        bool noticed = wait_for_news();
        read_report();
        read_outputs();
        look_for_commands(noticed);
        check_limits();
        climb();
    }
    close_task();
    tell_task_ended(task);
}

static bool open_log(void) {
    log_.fd = openat(folder, "log", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (log_.fd < 0)
        snprintf(failure, sizeof failure, "cannot open the log: %s", strerror(errno));
    return log_.fd >= 0;
}

static void fail_start(struct task *task) {
    task->cause = START_FAILED;
    task->code = -1;
}

/* The first child waits while `started` is written: a program that ran without that mark could run twice. */
static bool start_attempt(struct task *task) {
    if (!fork_child(task)) {
        fail_start(task);
        return true;
    }
    attempt_begun = boottime();
    attempt_begun_at = walltime();
    if (attempt_begun >= spec.start_by) {
        dismiss_child();
        return false;
    }
    if (attempt_begun >= spec.stop_after) {
        ladder.reason = STOP_AFTER;
        ladder.by = "limit";
        dismiss_child();
    } else if (!open_log() || !record_started()) {
        fail_start(task);
        dismiss_child();
    }
    return true;
}

/* Wait for the word to go on: meanwhile the owner of the attempt restores, keeps or replaces what the tasks work on. The answer is
 * whether there is a task to run. */
static bool hold(void) {
    held.on = true;
    held.go = held.end = false;
    put(event("holding"), ",\"task\":%u", held.next);
    send_event();
    while (!held.go && !held.end && !ladder.reason) {
        look_for_commands(wait_for_news());
        check_limits();
    }
    held.on = false;
    return held.go && !ladder.reason;
}

/* The service goes last. It has the grace of a stop, and is killed with all that is left then. */
static void end_service(void) {
    if (service.pid)
        ask_service_to_end();
    service.ending = true;
    ladder.killing = false;
    ladder.kill_at = ladder.stopping ? ladder.kill_at : later(boottime(), spec.stop_grace);
    ladder.stopping = true;
    reap();
    while (running.children_left) {
        look_for_commands(wait_for_news());
        if (!service.pid)
            start_killing();
        climb();
    }
}

/* Between two tasks a stop or a deadline counts as if it had come during one. */
static bool may_go_on(const struct task *before) {
    if (before->cause != EXITED || before->code != 0)
        return false;
    look_for_commands(true);
    if (!ladder.reason && boottime() >= spec.stop_after) {
        ladder.reason = STOP_AFTER;
        ladder.by = "limit";
    }
    return !ladder.reason;
}

static bool begin_task(struct task *task) {
    ladder.killing = false;
    if (!running.main && !fork_child(task)) {
        fail_start(task);
        return false;
    }
    release_child(task);
    return true;
}

/* Run the tasks one after the other; the first that fails ends the attempt. False: too late, and nothing was touched. */
static bool run_tasks(void) {
    if (!start_attempt(spec.tasks))
        return false;
    if (!running.main)
        return true;
    if (spec.hold)
        dismiss_child(); /* it was there to be recorded: which task is first is not known yet */
    while (spec.hold ? hold() : held.next < spec.task_count) {
        struct task *task = &spec.tasks[running.number = held.next];
        if (!begin_task(task))
            break;
        see_task_through(task);
        held.next++;
        if ((spec.hold || held.next < spec.task_count) && !may_go_on(task))
            break;
    }
    if (spec.hold)
        end_service();
    return true;
}

/* ---- the end ---- */

static bool reserve_exit(size_t size) {
    if (reserved < 0)
        reserved = openat(folder, "exit.tmp", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (reserved < 0)
        return false;
    int error = posix_fallocate(reserved, 0, (off_t)size);
    static const char zeros[4096];
    if (error == EOPNOTSUPP || error == ENOSYS || error == EINVAL) {
        error = 0;
        for (size_t at = 0; at < size && !error; at += sizeof zeros)
            if (pwrite(reserved, zeros, sizeof zeros, (off_t)at) != sizeof zeros)
                error = errno ? errno : ENOSPC;
    }
    errno = error;
    return !error;
}

static enum cause final_cause(const struct task *last) {
    if (ladder.reason)
        return ladder.reason;
    if (held.end)
        return EXITED;
    if (!last || last->cause == NONE)
        return START_FAILED;
    return last->cause;
}

static void put_end(struct text *t, const struct task *task) {
    if (!task && held.end && !ladder.reason)
        put(t, ",\"code\":0");
    if (task && task->ended && task->code >= 0)
        put(t, ",\"code\":%d", task->code);
    if (task && task->ended && task->signal)
        put(t, ",\"signal\":%d", task->signal);
}

static void put_tasks(struct text *t) {
    put(t, ",\"tasks\":[");
    const char *comma = "";
    for (size_t i = 0; i < spec.task_count; i++) {
        const struct task *task = &spec.tasks[i];
        if (!task->begun)
            continue;
        put(t, "%s{\"name\":", comma);
        comma = ",";
        put_string(t, task->name);
        put_field(t, "cause", CAUSES[task->cause]);
        put_end(t, task);
        put(t, ",\"started_at\":%" PRId64 ",\"ended_at\":%" PRId64 "}", task->started_at, task->ended_at);
    }
    put(t, "]");
}

static void put_usage(struct text *t) {
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    micros user = used.ru_utime.tv_sec * SECOND + used.ru_utime.tv_usec, system = used.ru_stime.tv_sec * SECOND + used.ru_stime.tv_usec;
    put(t, ",\"user_time\":%" PRId64 ",\"system_time\":%" PRId64 ",\"max_rss\":%" PRId64, user, system, (int64_t)used.ru_maxrss * 1024);
}

static void put_log(struct text *t) {
    put(t, ",\"log_length\":%" PRIu64 ",\"stdout_length\":%" PRIu64 ",\"stderr_length\":%" PRIu64, log_.length, log_.offsets[OUT],
        log_.offsets[ERR]);
    put(t, ",\"stdout_dropped\":%" PRIu64 ",\"stderr_dropped\":%" PRIu64, log_.dropped[OUT], log_.dropped[ERR]);
    put(t, ",\"log_lost\":%" PRIu64 ",\"copy_lost\":%" PRIu64, log_.lost[OUT] + log_.lost[ERR] + log_.lost[EVENT], copying.lost);
    put_field(t, "log_error", log_.error ? strerror(log_.error) : "");
}

static const struct task *last_task(void) {
    const struct task *last = NULL;
    for (size_t i = 0; i < spec.task_count; i++)
        if (spec.tasks[i].begun || spec.tasks[i].cause != NONE)
            last = &spec.tasks[i];
    return last;
}

static void describe_end(struct text *t, const struct task *last) {
    char boot[64];
    enum cause cause = final_cause(last);
    read_boot_id(boot, sizeof boot);
    put(t, "{\"version\":%d,\"token\":%" PRIu64, VERSION, highest_token);
    put_field(t, "cause", CAUSES[cause]);
    put_end(t, last);
    put_field(t, "reason", ladder.reason ? CAUSES[ladder.reason] : "");
    put_field(t, "stopped_by", ladder.reason ? ladder.by : "");
    put(t, ",\"killed\":%s", ladder.killed ? "true" : "false");
    put_field(t, "text", failure);
    put_field(t, "mark", spec.mark ? spec.mark : "");
    put_field(t, "boot_id", boot);
    put(t, ",\"started_at\":%" PRId64 ",\"ended_at\":%" PRId64 ",\"lasted\":%" PRId64, attempt_begun_at, walltime(),
        attempt_begun ? boottime() - attempt_begun : 0);
    uint64_t kills = oom_kills();
    put(t, ",\"oom_kills\":%" PRIu64, kills > oom_before ? kills - oom_before : 0);
    put_log(t);
    put_usage(t);
    put_tasks(t);
    put(t, "}\n");
}

static bool record_end(const struct text *t) {
    if (reserved < 0 && !reserve_exit(t->used))
        return false;
    if (pwrite(reserved, t->data, t->used, 0) != (ssize_t)t->used || ftruncate(reserved, (off_t)t->used) < 0)
        return false;
    fsync(reserved); /* a disk that cannot sync may still keep it */
    if (renameat(folder, "exit.tmp", folder, "exit") < 0)
        return false;
    fsync(folder);
    return true;
}

static int exit_status(const struct task *last) {
    enum cause cause = final_cause(last);
    if (cause == TIMED_OUT || cause == IDLE_TIMEOUT || cause == STOP_AFTER)
        return ENDED_LATE;
    if (!last && cause == EXITED)
        return 0;
    if (!last || !last->ended || cause == START_FAILED || cause == SERVICE_ENDED || cause == FAILED)
        return ENDED_UNSTARTED;
    return last->signal ? 128 + last->signal : last->code;
}

static void finish_copy(void) {
    micros until = boottime() + FLUSH_COPY;
    while (copying.used && boottime() < until) {
        struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
        poll(&out, 1, 100);
        flush_copy();
    }
    copying.lost += copying.used;
}

/* The last line of the copy is `exit` itself, once it is written: whoever reads an engine's log need not fetch the file. It is
 * in no log of ours, and left out where it does not fit or nobody reads. */
static void copy_end(const struct text *end) {
    if (!log_.copy || copying.lost || end->used + 128 > EVENT_ROOM)
        return;
    put(event("exit"), ",\"exit\":%.*s}", (int)end->used - 1, end->data);
    fill_header(event_data, EVENT, log_.offsets[EVENT], event_text.used);
    copy_frame(event_data, HEADER + event_text.used);
    finish_copy();
}

/* Write `exit`, with patience for a disk that comes back. */
static int end_attempt(void) {
    const struct task *last = last_task();
    struct text t = {.data = malloc(exit_room), .size = exit_room};
    finish_copy();
    if (!t.data)
        return LEFT_BROKEN;
    describe_end(&t, last);
    micros until = boottime() + RECORD_FOR;
    while (!record_end(&t)) {
        int error = errno;
        if (boottime() >= until || error == ENOENT || error == EROFS) {
            fprintf(stderr, "holdfast-supervisor: cannot write `exit`: %s\n", strerror(error));
            return LEFT_BROKEN;
        }
        usleep(500000);
    }
    copy_end(&t);
    return exit_status(last);
}

/* ---- main ---- */

static void open_standard_descriptors(void) {
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= 2);
    if (fd > 2)
        close(fd);
}

/* What the worker had open is not ours to keep open, nor the child's. */
static void close_inherited(void) {
    if (syscall(SYS_close_range, 3u, ~0u, 0u) == 0)
        return;
    DIR *open_fds = opendir("/proc/self/fd");
    if (!open_fds)
        return;
    uint64_t fd;
    for (struct dirent *entry; (entry = readdir(open_fds));)
        if (parse_number(entry->d_name, INT_MAX, &fd) && fd > 2 && (int)fd != dirfd(open_fds))
            close((int)fd);
    closedir(open_fds);
}

static void prepare_signals(void) {
    static const int OWN_FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigset_t blocked, awaited;
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigaction(SIGCHLD, &action, NULL); /* ignored by the worker, it would reap our children */
    sigfillset(&blocked);
    for (size_t i = 0; i < COUNT_OF(OWN_FAULTS); i++)
        sigdelset(&blocked, OWN_FAULTS[i]);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTERM);
    sigaddset(&awaited, SIGINT);
    sigaddset(&awaited, SIGIO);
    signals = signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* A probe holds a shared lock for an instant. So does, exclusively, the child of a supervisor that was killed between fork
 * and exec: it dies at once, but not sooner than we may come. */
static bool take_lock(void) {
    lock_fd = openat(folder, "lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (lock_fd < 0)
        return false;
    for (int tries = 0, taken = 0; tries < LOCK_TRIES && taken < HELD_TRIES; tries++) {
        if (flock(lock_fd, LOCK_EX | LOCK_NB) == 0)
            return true;
        if (flock(lock_fd, LOCK_SH | LOCK_NB) < 0)
            taken++;
        flock(lock_fd, LOCK_UN);
        usleep(1000);
    }
    return false;
}

static void prepare_copy(void) {
    copying.size = 65536;
    copying.data = malloc(copying.size);
    log_.copy = copying.data != NULL;
    fcntl(STDOUT_FILENO, F_SETFL, fcntl(STDOUT_FILENO, F_GETFL) | O_NONBLOCK);
}

static int leave(int status, const char *what) {
    fprintf(stderr, "holdfast-supervisor: %s\n", what);
    return status;
}

static bool exists(const char *name) {
    struct stat about;
    return fstatat(folder, name, &about, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT;
}

static int supervise(void) {
    if (!take_lock())
        return lock_fd < 0 ? leave(LEFT_BROKEN, "cannot open `lock`") : leave(LEFT_HELD, "another supervisor holds this folder");
    if (exists("started") || exists("exit"))
        return leave(LEFT_STARTED, "this attempt was started before");
    if (!reserve_exit(exit_room))
        return leave(LEFT_BROKEN, "no room for `exit`");
    if (!read_spec())
        return end_attempt();
    exit_room += spec.task_count * 640;
    if (!reserve_exit(exit_room)) {
        snprintf(failure, sizeof failure, "no room for `exit`: %s", strerror(errno));
        return end_attempt();
    }
    highest_token = spec.token;
    oom_before = oom_kills();
    watch_commands();
    if (!run_tasks()) {
        unlinkat(folder, "exit.tmp", 0);
        return leave(LEFT_LATE, "too late to start");
    }
    return end_attempt();
}

int main(int argc, char **argv) {
    bool copy = argc == 3 && strcmp(argv[2], "--copy") == 0;
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("holdfast-supervisor " VERSION_TEXT);
        return 0;
    }
    if (argc < 2 || argc > 3 || (argc == 3 && !copy) || argv[1][0] == '-')
        return leave(LEFT_USAGE, "usage: holdfast-supervisor FOLDER [--copy]");
    open_standard_descriptors();
    close_inherited();
    prepare_signals();
    setsid(); /* fails where we lead one already */
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    folder = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return leave(LEFT_BROKEN, "cannot open the folder");
    if (chdir("/") < 0) /* a folder of the worker's is not to be kept busy */
        return leave(LEFT_BROKEN, "cannot enter /");
    if (copy)
        prepare_copy();
    return supervise();
}
