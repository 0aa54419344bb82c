/* Makes the folder of a new attempt from a message of the worker, under another name that is then changed, so that the folder is
 * never incomplete. runner/process_staging.py makes the same folder where there is no launcher. Also sends the reports of a start.
 *
 * All of this runs in the process that becomes the supervisor; the launcher itself is in launcher.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "attempt.h"
#include "clock.h"
#include "files.h"
#include "launch.h"
#include "protocol.h"
#include "records.h"
#include "remove.h"
#include "spare_folder.h"
#include "text.h"

int worker = -1;
static uint64_t launched;

static bool set_text(char *value, void *into) {
    *(char **)into = value;
    return true;
}

static const struct key LAUNCH_KEYS[] = {
    {LAUNCH_KEY_ID, set_count, offsetof(struct launch, id)},
    {LAUNCH_KEY_START_BY, set_deadline, offsetof(struct launch, start_by)},
    {LAUNCH_KEY_FOLDER, set_folder, offsetof(struct launch, path)},
    {LAUNCH_KEY_CLAIM, set_folder, offsetof(struct launch, claim)},
    {LAUNCH_KEY_OWN, set_flag, offsetof(struct launch, own)},
    {LAUNCH_KEY_UID, set_id, offsetof(struct launch, uid)},
    {LAUNCH_KEY_GID, set_id, offsetof(struct launch, gid)},
    {LAUNCH_KEY_SPEC, set_text, offsetof(struct launch, spec)},
    {LAUNCH_KEY_REQUEST, set_text, offsetof(struct launch, request)},
    {LAUNCH_KEY_STDIN, set_text, offsetof(struct launch, input)},
    {LAUNCH_KEY_LIMITS, set_text, offsetof(struct launch, limits)},
    {LAUNCH_KEY_SECRETS, set_text, offsetof(struct launch, secrets)},
};
_Static_assert(COUNT_OF(LAUNCH_KEYS) == LAUNCH_KEY_COUNT, "a key of protocol.py is missing");

/* `data` has room for one more byte. */
bool parse_launch(char *data, size_t length, struct launch *l) {
    struct records records = {.at = data, .left = length};
    struct record r;
    char why[120];
    *l = (struct launch){.uid = -1, .gid = -1, .start_by = NEVER};
    enum parse parsed = take_title(&records, LAUNCH_TITLE, why, sizeof why);
    while (parsed == RECORD) {
        parsed = take_record(&records, &r);
        if (parsed == RECORD && !take_key(LAUNCH_KEYS, COUNT_OF(LAUNCH_KEYS), l, &r))
            return false;
    }
    if (parsed != END || !l->id || !l->path || !l->spec || !l->request || !l->limits)
        return false;
    const char *name = strrchr(l->path, '/') + 1;
    return *name && *name != '.' && strlen(name) < NAME_MAX - 16 && (l->uid < 0) == (l->gid < 0) && (!l->own || (l->uid > 0 && l->claim));
}

/* Write a file, which may be one of an ended attempt. It is not truncated first, because ext4 would write it to the disk at once. */
static bool write_file(int at, const char *name, const char *data, size_t length) {
    struct stat about;
    int fd = openat(at, name, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return false;
    bool written = write_all(fd, data, length) && fstat(fd, &about) == 0;
    written = written && ((size_t)about.st_size == length || ftruncate(fd, (off_t)length) == 0);
    int error = errno;
    close(fd);
    errno = error;
    return written;
}

static bool write_text(int at, const char *name, const char *text) { return !text || write_file(at, name, text, strlen(text)); }

static bool write_spares(int at) {
    static const char zeros[SPARE_BYTES];
    char name[] = "spare.0";
    for (int n = 0; n < SPARES; n++) {
        name[sizeof name - 2] = (char)('0' + n);
        if (faccessat(at, name, F_OK, AT_SYMLINK_NOFOLLOW) < 0 && !write_file(at, name, zeros, sizeof zeros))
            return false;
    }
    return true;
}

static bool give(int at, const char *name, const struct launch *l) {
    return l->uid < 0 || fchownat(at, name, (uid_t)l->uid, (gid_t)l->gid, AT_SYMLINK_NOFOLLOW) == 0;
}

static bool make_work(int at, const struct launch *l) {
    return mkdirat(at, "work", 0700) == 0 && mkdirat(at, "work/output", 0700) == 0 && write_text(at, "work/request.json", l->request) &&
           give(at, "work/request.json", l) && give(at, "work/output", l) && give(at, "work", l);
}

static bool fill(int at, const struct launch *l) {
    if (l->own && fchown(at, (uid_t)-1, (gid_t)l->gid) < 0)
        return false;
    return fchmod(at, l->own ? 0710 : 0711) == 0 && (mkdirat(at, "cmd", 0700) == 0 || errno == EEXIST) && make_work(at, l) && write_text(at, "stdin", l->input) &&
           write_text(at, "secrets", l->secrets) && write_spares(at) && write_text(at, "limits", l->limits) && write_text(at, "spec", l->spec);
}

/* A worker that was suspended for very long may have lost its uid to another attempt. */
static bool still_claimed(const struct launch *l) {
    char target[PATH_MAX];
    ssize_t length = l->own ? readlink(l->claim, target, sizeof target - 1) : 0;
    if (!l->own)
        return true;
    target[length < 0 ? 0 : length] = 0;
    return strcmp(target, l->path) == 0;
}

static void name_temporary(char *out, size_t size, const char *name) {
    uint32_t random = 0;
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) < 0)
        random = (uint32_t)boottime();
    snprintf(out, size, ".%s.%08x", name, random);
}

/* Open the folder above a path. */
static int open_above(const char *path) {
    char above[PATH_MAX];
    size_t length = (size_t)(strrchr(path, '/') - path) + 1;
    if (length >= sizeof above) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(above, path, length);
    above[length] = 0;
    return open(above, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* Make the folder and open it as `folder`. Return 0, or the error: EEXIST or ENOTEMPTY if another one made it first, ESTALE if its
 * uid is no longer its own, ETIME if it is too late to start. A spare folder is filled in the pool; a new one next to its final place. */
int make_attempt_folder(const struct launch *l, int pool) {
    char temporary[NAME_MAX];
    const char *name = strrchr(l->path, '/') + 1;
    name_temporary(temporary, sizeof temporary, name);
    if (boottime() >= l->start_by)
        return ETIME;
    int parent = open_above(l->path), error = 0;
    if (parent < 0)
        return errno;
    int from = pool >= 0 && take_spare_folder(pool, temporary) ? pool : parent;
    if (from == parent && mkdirat(parent, temporary, 0700) < 0)
        error = errno;
    if (!error) {
        folder = openat(from, temporary, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        if (folder < 0 || !fill(folder, l) || renameat(from, temporary, parent, name) < 0) {
            error = errno;
            remove_entry(from, temporary);
        }
    }
    close(parent);
    return error ? error : still_claimed(l) ? 0 : ESTALE;
}

/* Do not wait: if the worker does not read, it looks for the files itself. */
void send_report(uint32_t kind, uint64_t id, int64_t number) {
    struct report_head head = {.kind = kind, .id = id, .number = number};
    if (worker >= 0)
        (void)!send(worker, &head, sizeof head, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void note_launch(uint64_t id) { launched = id; }

/* Tell the worker that `started` is written. After that it hears of us from the launcher, or finds our files. */
void report_begun(void) {
    if (launched)
        send_report(REPORT_BEGUN, launched, getpid());
    close_fd(&worker);
}
