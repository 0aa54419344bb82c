/* Removes folder trees: for a worker, the folders of ended attempts (--remove), and an incomplete folder of our own.
 *
 * A child may have put anything into a tree: entries are removed relative to the descriptor of their folder, links are not followed,
 * and what is nested too deep is left to the worker. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"
#include "remove.h"
#include "spare_folder.h"

#define DEEPEST 64
#define REQUEST_ROOM 65536

static bool remove_at_depth(int above, const char *name, int depth);

static bool remove_content(int fd, int depth) {
    DIR *entries = fdopendir(fd);
    bool all = entries != NULL;
    if (!entries) {
        close(fd);
        return false;
    }
    for (struct dirent *entry; (entry = readdir(entries));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            bool folder = entry->d_type == DT_DIR;
            if (folder || (unlinkat(dirfd(entries), entry->d_name, 0) < 0 && errno != ENOENT))
                all = remove_at_depth(dirfd(entries), entry->d_name, depth + 1) && all;
        }
    closedir(entries);
    return all;
}

static bool remove_at_depth(int above, const char *name, int depth) {
    if (unlinkat(above, name, AT_REMOVEDIR) == 0 || errno == ENOENT)
        return true;
    if (errno == ENOTDIR)
        return unlinkat(above, name, 0) == 0 || errno == ENOENT;
    int fd = depth > DEEPEST ? -1 : openat(above, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || !remove_content(fd, depth))
        return false;
    return unlinkat(above, name, AT_REMOVEDIR) == 0 || errno == ENOENT;
}

/* Remove a file or a folder tree. Return whether nothing of it is left. */
bool remove_entry(int above, const char *name) { return remove_at_depth(above, name, 0); }

/* Remove what is in a folder. Return whether nothing is left. */
bool remove_below(int above, const char *name) {
    int fd = openat(above, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    return fd < 0 ? errno == ENOENT : remove_content(fd, 0);
}

/* Each message is a list of absolute paths, each ended by a zero byte. A path with a `+` before it is the folder of an attempt that
 * may be kept for a later one. The answer has a byte for each: 1 if nothing is left of it. */
int run_remover(const char *spare_folders) {
    static char paths[REQUEST_ROOM];
    char answer[REQUEST_ROOM / 2];
    int pool = open(spare_folders, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    setsid();
    for (;;) {
        ssize_t length = recv(STDIN_FILENO, paths, sizeof paths, 0);
        if (length < 0 && errno == EINTR)
            continue;
        if (length <= 0 || paths[length - 1])
            return 0;
        size_t count = 0;
        for (char *path = paths; path < paths + length; path += strlen(path) + 1)
            if (count < sizeof answer)
                answer[count++] = (*path == '+' && pool >= 0 && keep_spare_folder(pool, path + 1)) ||
                                  remove_entry(AT_FDCWD, path + (*path == '+'));
        if (send(STDIN_FILENO, answer, count, MSG_NOSIGNAL) < 0)
            return 0;
    }
}
