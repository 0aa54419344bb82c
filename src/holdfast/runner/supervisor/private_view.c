/* What the child of a private spec sees of the host: /tmp, shared memory, queues and /proc of its own, and a line for its user in
 * /etc/passwd. Called in the child, as root, before it changes its user (child.c). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "attempt.h"
#include "files.h"
#include "private_view.h"
#include "spec.h"

/* Where everybody may write. What a job leaves there would outlive it, as files of a user id that a later attempt gets. */
static const char *const OPEN_PLACES[] = {"/tmp", "/var/tmp", "/run/lock"};
#define PASSWD_ROOM (1u << 20)
/* Shared memory is no process's own, so no limit of a process counts it; without a size each job could take half of the host's. */
#define SCRATCH_ROOM "mode=1777,size=256m,nr_inodes=65536"

static bool ignore_missing(int result) { return result == 0 || errno == ENOENT; }

/* Cover a file below /etc with a copy that has one more line; the copy is on the child's own tmpfs and has no other name. */
static bool add_line(const char *path, const char *scratch, const char *line) {
    static char data[PASSWD_ROOM];
    char copy[64];
    snprintf(copy, sizeof copy, "%s/.holdfast", scratch);
    int from = open(path, O_RDONLY | O_CLOEXEC);
    if (from < 0)
        return errno == ENOENT;
    ssize_t length = read_fd(from, data, sizeof data - 2);
    close(from);
    int to = length < 0 ? -1 : open(copy, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (to < 0)
        return false;
    if (length && data[length - 1] != '\n')
        data[length++] = '\n';
    bool done = write_all(to, data, (size_t)length) && write_all(to, line, strlen(line)) && fchmod(to, 0444) == 0;
    close(to);
    done = done && mount(copy, path, NULL, MS_BIND, NULL) == 0;
    int error = errno;
    unlink(copy);
    errno = error;
    return done;
}

/* Programs look their user up, and initdb fails where there is none. */
static bool name_user(const char *scratch) {
    char line[PATH_MAX + 128];
    snprintf(line, sizeof line, "holdfast-%" PRId64 ":x:%" PRId64 ":%" PRId64 "::%s:/bin/sh\n", spec.uid, spec.uid, spec.gid,
             spec.cwd ? spec.cwd : "/");
    if (!add_line("/etc/passwd", scratch, line))
        return false;
    snprintf(line, sizeof line, "holdfast-%" PRId64 ":x:%" PRId64 ":\n", spec.gid, spec.gid);
    return add_line("/etc/group", scratch, line);
}

/* Open a folder of the one above it, which is made if it is not there; that one is closed. The child may have put a link there. */
static int step_down(int above, const char *name) {
    int fd = -1;
    if (mkdirat(above, name, 0711) == 0 || errno == EEXIST)
        fd = openat(above, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    close(above);
    if (fd >= 0 && fchmod(fd, 0711) < 0)
        close_fd(&fd);
    return fd;
}

/* Where a private folder covers the attempt's own folder, make its path again and put the folder there. */
static bool uncover(int there, const char *path, const char *place) {
    char names[PATH_MAX], source[40], target[40];
    size_t skip = strlen(place);
    if (strncmp(path, place, skip) != 0 || path[skip] != '/')
        return true;
    snprintf(names, sizeof names, "%s", path + skip + 1);
    int at = open(place, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (char *save = NULL, *name = strtok_r(names, "/", &save); name && at >= 0; name = strtok_r(NULL, "/", &save))
        at = step_down(at, name);
    if (at < 0)
        return false;
    snprintf(source, sizeof source, "/proc/self/fd/%d", there);
    snprintf(target, sizeof target, "/proc/self/fd/%d", at);
    return mount(source, target, NULL, MS_BIND, NULL) == 0;
}

/* The attempt's own folder `tmp` takes the place of each folder where everybody may write. */
static bool cover_open_places(void) {
    char source[40], path[PATH_MAX];
    snprintf(source, sizeof source, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(source, path, sizeof path - 1);
    if (length < 0)
        return false;
    path[length] = 0;
    /* Once more, by its name: the descriptor that we have belongs to the host's mounts. */
    int there = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    int tmp = openat(there, "tmp", O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (there < 0 || tmp < 0)
        return false;
    snprintf(source, sizeof source, "/proc/self/fd/%d", tmp);
    for (size_t i = 0; i < COUNT_OF(OPEN_PLACES); i++)
        if (!ignore_missing(mount(source, OPEN_PLACES[i], NULL, MS_BIND, NULL)) || !uncover(there, path, OPEN_PLACES[i]))
            return false;
    close(there);
    close(tmp);
    return true;
}

bool make_private_tmp(void) {
    return (mkdirat(folder, "tmp", 0700) == 0 || errno == EEXIST) &&
           fchownat(folder, "tmp", (uid_t)spec.uid, (gid_t)spec.gid, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Mounts, System V objects and message queues of its own: what the child leaves there is gone with it, and it sees no other job's.
 * The new /proc shows it no processes but its own; where the kernel cannot do that, the old one stays. */
bool see_privately(void) {
    const char *scratch = access("/dev/shm", F_OK) == 0 ? "/dev/shm" : "/tmp";
    if (!make_private_tmp() || unshare(CLONE_NEWNS | CLONE_NEWIPC) < 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
        return false;
    if (mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, SCRATCH_ROOM) < 0 || !name_user(scratch) || !cover_open_places())
        return false;
    if (!ignore_missing(mount("mqueue", "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)))
        return false;
    (void)!mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2");
    return true;
}

/* Whether the kernel lets us: a container may not have the right. */
int probe_privacy(void) {
    if (unshare(CLONE_NEWNS | CLONE_NEWIPC) < 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
        return errno == EPERM ? 1 : 2;
    return mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") < 0;
}
