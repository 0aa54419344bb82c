/* Folders of ended attempts that are used again. Implemented in spare_folder.c. */
#ifndef SPARE_FOLDER_H
#define SPARE_FOLDER_H

#include <stdbool.h>

bool take_spare_folder(int pool, const char *name);
bool keep_spare_folder(int pool, const char *path);

#endif
