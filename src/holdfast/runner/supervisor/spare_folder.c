/* Keeps the folders of ended attempts for later ones. A file system may need long to create a file after many were deleted: ext4
 * examines every inode of the group that was deleted in the last seconds. So what no job could ever open is used again: the attempt's
 * folder, `cmd`, and the files of the worker and the supervisor. `work` and all else that a job had is removed.
 *
 * A folder in the pool has these entries at most, with `exit` and `started` under the names that the supervisor overwrites. A name that begins with a dot is a folder in the hands of one process; the sweep
 * removes it if that process dies. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"
#include "remove.h"
#include "spare_folder.h"
#include "text.h"

#define MOST_SPARE 64

static const char *const KEPT_FILES[] = {"spare.0", "spare.1", "spare.2", "lock", "limits", "spec", "log", "exit", "started"};
static const char *const EMPTIED_FILES[] = {"spec", "log"}; /* they may have secrets */

static bool is_plain_name(const char *name) { return name[0] != '.'; }

/* Take any folder of the pool, and call it `name`, which begins with a dot. */
bool take_spare_folder(int pool, const char *name) {
    int fd = openat(pool, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    bool taken = false;
    if (!entries) {
        close_fd(&fd);
        return false;
    }
    for (struct dirent *entry; !taken && (entry = readdir(entries));)
        taken = is_plain_name(entry->d_name) && renameat(pool, entry->d_name, pool, name) == 0; /* another one may be faster */
    closedir(entries);
    return taken;
}

static size_t count_spare_folders(int pool) {
    int fd = openat(pool, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    size_t count = 0;
    if (!entries) {
        close_fd(&fd);
        return MOST_SPARE;
    }
    for (struct dirent *entry; (entry = readdir(entries));)
        count += is_plain_name(entry->d_name);
    closedir(entries);
    return count;
}

/* Return whether an entry can be kept: a file of ours that has no other name. */
static bool is_kept(int at, const char *name) {
    struct stat about;
    for (size_t i = 0; i < COUNT_OF(KEPT_FILES); i++)
        if (strcmp(name, KEPT_FILES[i]) == 0)
            return fstatat(at, name, &about, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(about.st_mode) && about.st_nlink == 1 &&
                   about.st_uid == geteuid() && (about.st_mode & 07777) == 0600;
    if (strcmp(name, "cmd") == 0)
        return fstatat(at, name, &about, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(about.st_mode) && about.st_uid == geteuid();
    return false;
}

static bool empty_file(int at, const char *name) {
    int fd = openat(at, name, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    bool empty = fd < 0 ? errno == ENOENT : ftruncate(fd, 0) == 0;
    close_fd(&fd);
    return empty;
}

/* Remove all that cannot be kept, while the folder is in its place: if we die, it is found there, with the uid of its job. */
static bool remove_the_rest(int at) {
    int fd = openat(at, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    bool removed = entries != NULL;
    if (!entries)
        close_fd(&fd);
    for (struct dirent *entry; removed && (entry = readdir(entries));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 && !is_kept(at, entry->d_name))
            removed = remove_entry(at, entry->d_name);
    if (entries)
        closedir(entries);
    return removed && remove_below(at, "cmd");
}

static bool make_reusable(int at) {
    bool emptied = renameat(at, "exit", at, "exit.tmp") == 0 && renameat(at, "started", at, "started.tmp") == 0;
    for (size_t i = 0; emptied && i < COUNT_OF(EMPTIED_FILES); i++)
        emptied = empty_file(at, EMPTIED_FILES[i]);
    return emptied && fchmod(at, 0700) == 0;
}

/* Move the folder of an ended attempt into the pool. Return false if it is still in its place. */
bool keep_spare_folder(int pool, const char *path) {
    char held[32];
    uint32_t random;
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) < 0 || count_spare_folders(pool) >= MOST_SPARE)
        return false;
    snprintf(held, sizeof held, ".%08x", random);
    int at = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (at < 0 || !remove_the_rest(at) || renameat(AT_FDCWD, path, pool, held) < 0) {
        close_fd(&at);
        return false;
    }
    if (!make_reusable(at) || renameat(pool, held, pool, held + 1) < 0)
        remove_entry(pool, held);
    close(at);
    return true;
}
