/* Complete reads and writes of descriptors and small files. The files of the attempt are written in log.c, tasks.c (`started`) and
 * exit_file.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "files.h"

/* Return whether a write failed because the disk or the user's quota is full. */
bool is_full(int error) { return error == ENOSPC || error == EDQUOT; }

bool write_all(int fd, const void *data, size_t length) {
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

/* Read up to `size` bytes of a small file. Return the number of bytes, or -1. */
ssize_t read_fd(int fd, char *data, size_t size) {
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

bool read_text(const char *path, char *data, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read_fd(fd, data, size - 1);
    close(fd);
    data[n < 0 ? 0 : n] = 0;
    return n >= 0;
}

void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}
