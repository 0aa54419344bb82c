/* Complete reads and writes of descriptors and small files. Implemented in files.c. */
#ifndef FILES_H
#define FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

bool is_full(int error);
bool write_all(int fd, const void *data, size_t length);
ssize_t read_fd(int fd, char *data, size_t size);
bool read_text(const char *path, char *data, size_t size);
void close_fd(int *fd);

#endif
