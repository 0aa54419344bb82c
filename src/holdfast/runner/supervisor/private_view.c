/* Gives a child a private view of the host: its own /tmp, shared memory, message queues and /proc, and an entry for its user in
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

/* Folders that every user can write to. Files left there would outlive the attempt and belong to a uid that a later attempt gets. */
static const char *const SHARED_FOLDERS[] = {"/tmp", "/var/tmp", "/run/lock"};
#define PASSWD_ROOM (1u << 20)
/* No limit of a process counts shared memory; without a size, each job could use half of the host's memory. */
#define SCRATCH_OPTIONS "mode=1777,size=256m,nr_inodes=65536"

static bool ignore_missing(int result) { return result == 0 || errno == ENOENT; }

/* Mount a copy with one more line over a file in /etc. The copy is on the child's own tmpfs, and its name there is removed. */
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

/* Programs look up their own user, and initdb fails without an entry. */
static bool add_user_entries(const char *scratch) {
    char line[PATH_MAX + 128];
    snprintf(line, sizeof line, "holdfast-%" PRId64 ":x:%" PRId64 ":%" PRId64 "::%s:/bin/sh\n", spec.uid, spec.uid, spec.gid,
             spec.cwd ? spec.cwd : "/");
    if (!add_line("/etc/passwd", scratch, line))
        return false;
    snprintf(line, sizeof line, "holdfast-%" PRId64 ":x:%" PRId64 ":\n", spec.gid, spec.gid);
    return add_line("/etc/group", scratch, line);
}

/* Open a folder inside `above`, creating it if needed, and close `above`. Links are refused: the child may have made one. */
static int open_or_make_folder(int above, const char *name) {
    int fd = -1;
    if (mkdirat(above, name, 0711) == 0 || errno == EEXIST)
        fd = openat(above, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    close(above);
    if (fd >= 0 && fchmod(fd, 0711) < 0)
        close_fd(&fd);
    return fd;
}

/* If the attempt's folder is below a covered folder, create its path there and mount it again. */
static bool expose_attempt_folder(int there, const char *path, const char *covered) {
    char names[PATH_MAX], source[40], target[40];
    size_t skip = strlen(covered);
    if (strncmp(path, covered, skip) != 0 || path[skip] != '/')
        return true;
    snprintf(names, sizeof names, "%s", path + skip + 1);
    int at = open(covered, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (char *save = NULL, *name = strtok_r(names, "/", &save); name && at >= 0; name = strtok_r(NULL, "/", &save))
        at = open_or_make_folder(at, name);
    if (at < 0)
        return false;
    snprintf(source, sizeof source, "/proc/self/fd/%d", there);
    snprintf(target, sizeof target, "/proc/self/fd/%d", at);
    return mount(source, target, NULL, MS_BIND, NULL) == 0;
}

/* Mount the attempt's own folder `tmp` over each folder that every user can write to. */
static bool cover_shared_folders(void) {
    char source[40], path[PATH_MAX];
    snprintf(source, sizeof source, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(source, path, sizeof path - 1);
    if (length < 0)
        return false;
    path[length] = 0;
    /* Open it again by name: the descriptor that we have belongs to the mounts of the host. */
    int there = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    int tmp = openat(there, "tmp", O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (there < 0 || tmp < 0)
        return false;
    snprintf(source, sizeof source, "/proc/self/fd/%d", tmp);
    for (size_t i = 0; i < COUNT_OF(SHARED_FOLDERS); i++)
        if (!ignore_missing(mount(source, SHARED_FOLDERS[i], NULL, MS_BIND, NULL)) || !expose_attempt_folder(there, path, SHARED_FOLDERS[i]))
            return false;
    close(there);
    close(tmp);
    return true;
}

bool make_private_tmp(void) {
    return (mkdirat(folder, "tmp", 0700) == 0 || errno == EEXIST) &&
           fchownat(folder, "tmp", (uid_t)spec.uid, (gid_t)spec.gid, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Create mount and IPC namespaces: what the child leaves there disappears with it, and it sees nothing of other jobs. The new
 * /proc shows only its own processes; if the kernel does not support that, the old one stays. */
bool enter_private_view(void) {
    const char *scratch = access("/dev/shm", F_OK) == 0 ? "/dev/shm" : "/tmp";
    if (!make_private_tmp() || unshare(CLONE_NEWNS | CLONE_NEWIPC) < 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
        return false;
    if (mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, SCRATCH_OPTIONS) < 0 || !add_user_entries(scratch) || !cover_shared_folders())
        return false;
    if (!ignore_missing(mount("mqueue", "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)))
        return false;
    (void)!mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2");
    return true;
}

/* Test whether the kernel allows a private view; a container may lack the privilege. */
int probe_private_view(void) {
    if (unshare(CLONE_NEWNS | CLONE_NEWIPC) < 0 || mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0)
        return errno == EPERM ? 1 : 2;
    return mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") < 0;
}
